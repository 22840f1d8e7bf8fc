"""The shape of a decoder-only model. The model's family reads the shape from `config.json`."""

from dataclasses import dataclass, replace
from typing import Literal

EXPERT_TARGETS = ("gate_proj", "up_proj", "down_proj")
"""The LoRA targets that every expert of a mixture has."""


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's change of RoPE's frequencies for long contexts (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class LinearScaling:
    """All of RoPE's frequencies are divided by `factor` (`rope_type: linear`)."""

    factor: float


@dataclass(frozen=True)
class YarnScaling:
    """RoPE's frequencies by YaRN (Peng et al., 2023, arXiv:2309.00071; `rope_type: yarn`)."""

    factor: float
    # Pairs of dimensions that make more than `beta_fast` full turns within the original number of
    # positions stay unchanged.
    beta_fast: float
    # Pairs that make fewer than `beta_slow` full turns rotate `factor` times slower. A pair between
    # the limits `beta_fast` and `beta_slow` gets a weighted mean of the original frequency and the
    # slower frequency.
    beta_slow: float
    original_max_positions: int
    attention_factor: float  # the factor of RoPE's cosines and sines
    truncate: bool  # Whether the limits of the weighted means are whole dimensions.


@dataclass(frozen=True)
class Window:
    """Layers with sliding-window attention. A token attends only to the latest `tokens` tokens."""

    tokens: int  # Number of tokens that a token attends to, itself included.
    layers: tuple[bool, ...]  # For each layer, whether the layer has the window.
    # RoPE's theta in the layers that have the window. With this theta, the RoPE of these layers is
    # not scaled. None: all layers have the same RoPE.
    rope_theta: float | None = None


@dataclass(frozen=True)
class ProportionalRope:
    """RoPE that rotates only the first pairs of a head's dimensions (`rope_type: proportional`).
    `share` is the fraction of pairs that rotate. The frequencies of all pairs that rotate are
    divided by `factor`."""

    share: float
    factor: float


@dataclass(frozen=True)
class GlobalHeads:
    """The heads of layers without a window, if they differ from the heads of the other layers
    (Gemma 4)."""

    head_dim: int
    num_kv_heads: int
    # Values are equal to the keys before normalisation, so there is no v_proj.
    keys_are_values: bool


@dataclass(frozen=True)
class QueryGrowth:
    """Queries at position p are multiplied by 1 + rate * log(1 + floor(p / positions)), as in Llama
    4."""

    rate: float
    positions: int


@dataclass(frozen=True)
class MoE:
    """A mixture of experts. For each token, a router scores all experts and chooses the best
    experts."""

    num_experts: int
    experts_per_token: int
    ffn_hidden_size: int  # Size of one expert's MLP.
    norm_topk_prob: bool  # Whether the chosen experts' probabilities are divided by their sum.
    # The function that turns the router's logits of all experts into probabilities. The sigmoid
    # router (DeepSeek-V3, 2024, arXiv:2412.19437) divides the experts into `groups` equal groups,
    # and first chooses the best groups: `groups_per_token` for each token. From these groups, it
    # then chooses the experts with the largest sum of probability and bias. Each expert has its own
    # bias.
    router: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    groups_per_token: int = 1
    scale: float = 1.0  # The factor by which the sigmoid router multiplies its probabilities.
    dense_layers: int = 0  # The first `dense_layers` layers have an MLP and no experts.
    shared_size: int = 0  # Size of an MLP that all tokens use in addition to their experts.
    shared_name: str = "shared_experts"  # The shared MLP's name in Hugging Face's checkpoints.
    # Whether the shared MLP's output is multiplied by a sigmoid that is computed for each token.
    shared_gate: bool = False
    # Whether PEFT and vLLM adapt gate and up of all experts as a single layer.
    fused_adapters: bool = False
    # GPT-OSS: the router and each expert's layers have biases, and the experts' activation is
    # `clamped_swiglu`.
    biases: bool = False
    # Gemma 4: a layer has both an MLP and experts, each with its own norms. The router's input
    # differs from the experts' input. Each expert's output is multiplied by the expert's own
    # factor.
    beside_mlp: bool = False


@dataclass(frozen=True)
class GatedDeltaNet:
    """Layers whose attention is a gated delta net (Yang et al., 2024, arXiv:2412.06464). Each value
    head has a state. Each token multiplies the state by a decay factor, corrects the state, and
    reads a value from the state."""

    layers: tuple[bool, ...]  # for each layer, whether its attention is a delta net
    key_heads: int
    value_heads: int  # each key head serves an equal number of value heads
    key_head_dim: int
    value_head_dim: int
    # Number of tokens that the convolution before the delta net sees, the current token included.
    conv_tokens: int

    @property
    def key_size(self) -> int:
        """The number of features of all heads' queries together. Keys have as many features as
        queries."""
        return self.key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        return self.value_heads * self.value_head_dim

    @property
    def sections(self) -> tuple[int, int, int]:
        """The numbers of in_proj_qkv's output features that are queries, keys and values."""
        return self.key_size, self.key_size, self.value_size


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, 2024, arXiv:2405.04434). Queries are computed from
    one normalised latent vector. Keys and values are computed from another latent vector. RoPE
    rotates additional features: the last features of each query, and key features that all heads
    share."""

    # Size of the latent vector of queries; None: queries are computed from the hidden state.
    q_rank: int | None
    kv_rank: int
    nope_size: int  # features of a query or key that RoPE does not rotate
    rope_size: int
    value_size: int

    @property
    def down(self) -> dict[str, int]:
        """Name of a projection to a latent vector -> number of output features. The features of
        kv_a_proj_with_mqa include the key features that all heads share."""
        queries = {} if self.q_rank is None else {"q_a_proj": self.q_rank}
        return queries | {"kv_a_proj_with_mqa": self.kv_rank + self.rope_size}

    @property
    def key_value_size(self) -> int:
        """The number of kv_b_proj's output features per head."""
        return self.nope_size + self.value_size


@dataclass(frozen=True)
class Arch:
    """The shape of a model. Sizes are numbers of elements unless noted."""

    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int  # size of an MLP that is not an expert
    vocab_size: int
    max_positions: int
    tie_embeddings: bool
    rope_theta: float
    rms_norm_eps: float
    qk_norm: bool
    qkv_bias: bool
    rope_scaling: RopeScaling | LinearScaling | YarnScaling | ProportionalRope | None = None
    window: Window | None = None
    activation: Literal["silu", "gelu_tanh"] = "silu"  # Activation of the MLP's gate.
    attention_scale: float | None = None  # Factor of query-key products; None: 1 / sqrt(head_dim).
    embedding_scale: float | None = None  # Factor of the embeddings.
    offset_norms: bool = False  # The norms multiply by 1 + weight.
    # RoPE rotates the first `rotary_size` dimensions of a head; None: all dimensions.
    rotary_size: int | None = None
    # The outputs of attention and MLP are normalised before they are added to the input.
    post_norms: bool = False
    moe: MoE | None = None
    output_bias: bool = False  # Whether o_proj has a bias.
    # In each head, the attention's softmax has an additional learned logit, which belongs to no key
    # or value.
    sinks: bool = False
    gdn: GatedDeltaNet | None = None
    # With MLA, `head_dim` is the size of queries and keys. RoPE rotates the last `rotary_size`
    # features of each query and key.
    mla: LatentAttention | None = None
    # q_proj also outputs a gate per query feature; the attention's output is multiplied by the
    # gate's sigmoid.
    output_gate: bool = False
    weight_prefix: str = "model."  # Prefix of all tensor names except the output layer's name.
    # The norms of queries and keys are computed over all heads together.
    wide_qk_norm: bool = False
    pre_norms: bool = True  # the inputs of attention and MLP are normalised
    rope_layers: tuple[bool, ...] | None = None  # whether each layer has RoPE; None: all have RoPE
    query_growth: QueryGrowth | None = None
    global_heads: GlobalHeads | None = None
    keys_are_values: bool = False  # whether all layers use keys as values; see `GlobalHeads`
    value_norm: bool = False  # values are normalised, without a weight
    layer_scalars: bool = False  # each layer's output is multiplied by a frozen scalar
    softcap: float | None = None  # logits are softcap * tanh(logits / softcap)

    @property
    def rope_factor(self) -> float:
        """The factor by which RoPE's cosines and sines are multiplied."""
        return (
            self.rope_scaling.attention_factor
            if isinstance(self.rope_scaling, YarnScaling)
            else 1.0
        )

    def of_layer(self, layer: int) -> "Arch":
        """The model's shape with the heads of layer `layer`."""
        heads = self.global_heads
        if heads is None or (self.window is not None and self.window.layers[layer]):
            return self
        return replace(
            self,
            head_dim=heads.head_dim,
            num_kv_heads=heads.num_kv_heads,
            keys_are_values=heads.keys_are_values,
            global_heads=None,
        )

    @property
    def kinds(self) -> list["Arch"]:
        """The shape of each layer (`of_layer`), or a single shape if all layers are equal."""
        return [
            self.of_layer(layer) for layer in range(self.num_layers if self.global_heads else 1)
        ]

    @property
    def rope_sizes(self) -> tuple[int, int]:
        """The number of dimensions that RoPE rotates in a head, as a pair: for layers without a
        window, and for layers with a window."""
        heads = self.global_heads
        size = self.head_dim if self.rotary_size is None else self.rotary_size
        return (size if heads is None else heads.head_dim), size

    @property
    def query_size(self) -> int:
        """Output features of q_proj."""
        return self.num_heads * self.head_dim

    @property
    def output_size(self) -> int:
        """Input features of o_proj."""
        return self.num_heads * (self.head_dim if self.mla is None else self.mla.value_size)

    @property
    def kv_size(self) -> int:
        """The number of k_proj's output features. v_proj has the same number."""
        return self.num_kv_heads * self.head_dim

    @property
    def value_size(self) -> int:
        """The number of features of all heads' values together."""
        return self.kv_size if self.mla is None else self.output_size
