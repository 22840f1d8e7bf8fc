"""The oracle's cases. A case has a model, a topology, trained parameters, and packed rows. All
parts of a case are drawn from a seed."""

import random
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tandem.model.rows import RowTensors, pad_row
from tandem.spool.schema import DELTA_NET_TARGETS, LATENT_TARGETS, LORA_TARGETS, LoraShape
from tiny import GEMMA4_MOE, SHAPE, VISIONS

DENSE = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
MIXTURES = ("qwen3_moe", "glm4_moe", "gpt_oss")
# GPT-OSS is missing because vLLM on the CPU can't serve it.
SERVED_FAMILIES = (
    *(*DENSE, "qwen3_moe", "glm4_moe"),
    *("olmo3", "smollm3", "ministral3", "qwen3_vl", "mistral3", "gemma4_text"),
)
SERVED = 1000
"""From this seed on, vLLM can serve the cases. They are of `SERVED_FAMILIES` in turn, with heads of
32 features."""
DELTA_NETS = 2000
"""From this seed on the cases are of Qwen3.5."""
DELTA_MIXTURES = 3000
"""From this seed on the cases are of Qwen3.5's mixtures of experts."""
SMALL = 4000
"""From this seed on the cases are of `SMALL_FAMILIES` in turn."""
SMALL_FAMILIES = ("olmo3", "smollm3", "ministral3", "qwen3_vl", "qwen3_vl_moe", "mistral3")
LATENTS = 5000
"""From this seed on the cases are of `LATENT_FAMILIES`, which have latent attention, in turn."""
LATENT_FAMILIES = ("glm4_moe_lite", "deepseek_v3")
GEMMA4S = 6000
"""From this seed on the cases are of Gemma 4. Every third case is of Gemma 4's mixture of
experts."""
SEED_OSS = 7000
"""From this seed on the cases are of Seed-OSS."""
VOCABULARY = SHAPE["vocab_size"]


@dataclass
class Node:
    """A node of a tree of tokens. The node's tokens follow the tokens of the nodes above it. Each
    child is another continuation."""

    tokens: list[int]
    children: list["Node"] = field(default_factory=list)


@dataclass
class Item:
    """A token with a loss. `slot`: the token's slot. `source`: the slot of the preceding token.
    `weight`: the token's weight in the loss. `sequence`: the number of a sequence with this token.
    `position`: the token's position in this sequence."""

    slot: int
    source: int
    token: int
    weight: float
    sequence: int
    position: int


@dataclass
class Row:
    """A packed row and the sequences that are packed in it."""

    tensors: RowTensors
    items: list[Item]
    sequences: list[list[int]]

    @property
    def weights(self) -> torch.Tensor:
        return torch.tensor([item.weight for item in self.items])


@dataclass(frozen=True)
class Case:
    seed: int
    family: str
    config: dict[str, Any]  # Values that are added to `tiny.SHAPE`.
    sizes: dict[str, Any]  # Arguments of `Sizes`.
    lora: LoraShape | None  # `lora` is None if all weights are trained.
    keep: int
    temperature: float

    def __str__(self) -> str:
        sizes = "-".join(
            f"{name}{int(size)}" for name, size in self.sizes.items() if size not in (1, False)
        )
        trained = "full" if self.lora is None else f"r{self.lora.rank}x{len(self.lora.targets)}"
        return f"{self.seed}:{self.family}-{trained}-keep{self.keep}-{sizes or 'alone'}"

    @property
    def world(self) -> int:
        return (
            self.sizes["tensor"]
            * self.sizes["context"]
            * self.sizes["data"]
            * self.sizes["pipeline"]
        )

    def rows(self) -> list[Row]:
        """Two rows for each data-parallel rank. All rows are equally long, like the rows of a
        job."""
        rng = random.Random(f"rows {self.seed}")
        # Context-parallel ranks share a row in blocks of 128 slots.
        least = 300 if self.sizes["context"] > 1 else 40
        rows = [_row(rng, least) for _ in range(2 * self.sizes["data"])]
        longest = max(len(row.tensors.tokens) for row in rows)
        return [replace(row, tensors=pad_row(row.tensors, longest)) for row in rows]


def draw(seed: int) -> Case:
    rng = random.Random(seed)
    mixture = rng.random() < 0.45
    family = rng.choice(MIXTURES if mixture else DENSE)
    if SERVED <= seed < DELTA_NETS:
        family = SERVED_FAMILIES[seed % len(SERVED_FAMILIES)]
        mixture = family in MIXTURES
    if DELTA_NETS <= seed < SMALL:
        mixture = seed >= DELTA_MIXTURES
        family = "qwen3_5_moe_text" if mixture else "qwen3_5_text"
    if SMALL <= seed < LATENTS:
        family = SMALL_FAMILIES[seed % len(SMALL_FAMILIES)]
        mixture = family == "qwen3_vl_moe"
    latents = LATENTS <= seed < GEMMA4S
    if latents:
        family, mixture = LATENT_FAMILIES[seed % 2], True
    if GEMMA4S <= seed < SEED_OSS:
        family, mixture = "gemma4_text", seed % 3 == 0
    if seed >= SEED_OSS:
        family, mixture = "seed_oss", False
    gemma4 = family == "gemma4_text"
    delta_nets = family.startswith("qwen3_5")
    world = rng.choice((1, 2, 2, 4, 4, 8))
    tensor = rng.choice([size for size in (1, 1, 2, 4) if world % size == 0])
    context = rng.choice([size for size in (1, 1, 2) if world // tensor % size == 0])
    context = 1 if delta_nets or latents else context
    sizes = {"tensor": tensor, "context": context, "data": world // tensor // context}
    sizes["sequence"] = tensor > 1 and (mixture or rng.random() < 0.5)
    if mixture:
        sizes["expert"] = rng.choice([size for size in (1, 2, 4) if world % size == 0])
        sizes["expert_tensor"] = rng.choice(
            [size for size in (1, 2) if world // sizes["expert"] % size == 0]
        )
    lora = None
    if family in ("glm4_moe", "gpt_oss", *VISIONS) or (gemma4 and mixture) or rng.random() < 0.5:
        attention = family in ("gpt_oss", "qwen3_vl_moe")
        targets = LORA_TARGETS[:4] if attention else LORA_TARGETS
        if gemma4:  # `k_proj` has no adapter, because it also computes the values.
            targets = tuple(one for one in targets if one != "k_proj")
            targets = ("q_proj", "v_proj", "o_proj") if mixture else targets
        if delta_nets:
            targets = LORA_TARGETS + DELTA_NET_TARGETS
        if latents:
            queries = LORA_TARGETS[:1] if _one_projection(seed) else LATENT_TARGETS[:2]
            targets = queries + LATENT_TARGETS[2:] + LORA_TARGETS[3:]
        chosen = [target for target in targets if rng.random() < 0.6] or [targets[0]]
        if chosen == ["v_proj"] and gemma4:  # Not all layers of Gemma 4 have `v_proj`.
            chosen = ["q_proj", "v_proj"]
        rank = rng.randint(1, 6)
        lora = LoraShape(
            rank=rank, alpha=rank * rng.choice((0.25, 0.5, 1.0)), targets=tuple(chosen)
        )
    kept, temperature = rng.randint(0, 2), rng.choice((1.0, 0.7, 1.4))
    config = _latent_config(rng, seed, family) if latents else _config(rng, family)
    if gemma4:
        config |= _gemma4(rng, config["num_hidden_layers"], tensor, mixture)
    if SERVED <= seed < DELTA_NETS:
        config |= {"head_dim": 32, "hidden_size": 64}
        if gemma4:
            config["global_head_dim"] = 64
        if family == "qwen2":
            # vLLM refuses models that have a window in some layers only.
            config.pop("use_sliding_window", None)
            # vLLM does not read `head_dim` of Qwen2.
            config["hidden_size"] = 32 * config["num_attention_heads"]
        if family == "glm4_moe":
            # With tied embeddings vLLM would leave the output layer empty.
            config["tie_word_embeddings"] = False
    return Case(
        seed,
        family,
        config,
        _staged(seed, sizes, config["num_hidden_layers"]),
        lora,
        kept,
        temperature,
    )


def _one_projection(seed: int) -> bool:
    """Whether a case with latent attention computes queries by one projection, without a latent."""
    return seed // 2 % 3 == 2


def _latent_config(rng: random.Random, seed: int, family: str) -> dict[str, Any]:
    config = _config(rng, family)
    del config["head_dim"]
    layers = config["num_hidden_layers"]
    config |= {
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": None if _one_projection(seed) else rng.randint(8, 24),
        "kv_lora_rank": rng.randint(8, 20),
        "qk_nope_head_dim": rng.choice((6, 8, 10)),
        "qk_rope_head_dim": rng.choice((4, 6, 8)),
        "v_head_dim": rng.choice((6, 8, 12, 20)),
        "first_k_dense_replace": rng.randint(0, min(1, layers - 1)),
        "norm_topk_prob": rng.random() < 0.7,
        "n_group": (groups := rng.choice((1, 2, 4))),
        "topk_group": min(groups, 2),
    }
    if family == "deepseek_v3" and rng.random() < 0.6:
        config["rope_parameters"] = {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 8.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 16,
            **rng.choice(({}, {"mscale": 1.0, "mscale_all_dim": 0.7})),
        }
    return config


def _staged(seed: int, sizes: dict[str, Any], layers: int) -> dict[str, Any]:
    """Adds pipeline stages to some topologies. The stages replace data-parallel ranks, or add ranks
    up to a total of 8 ranks."""
    rng, experts = (
        random.Random(f"pipeline {seed}"),
        sizes.get("expert", 1) * sizes.get("expert_tensor", 1),
    )
    stage = sizes["tensor"] * sizes["context"] * sizes["data"]
    fits = [(1, sizes["data"])]
    for stages in range(2, layers + 1):
        fits += [(stages, sizes["data"])] if stage * stages <= 8 else []
        divides = sizes["data"] % stages == 0 and stage // stages % experts == 0
        fits += [(stages, sizes["data"] // stages)] if divides else []
    stages, data = rng.choice(fits)
    return {**sizes, "pipeline": stages, "data": data}


def _config(rng: random.Random, family: str) -> dict[str, Any]:
    config: dict[str, Any] = {
        "num_hidden_layers": rng.randint(1, 3),
        "num_key_value_heads": 4,
        "num_attention_heads": rng.choice((4, 8)),
        "head_dim": rng.choice((8, 16)),
        "hidden_size": rng.choice((32, 48)),
        "rms_norm_eps": rng.choice((1e-6, 1e-5)),
        "tie_word_embeddings": rng.random() < 0.5,
    }
    window = rng.randint(3, 9)
    match family:
        case "llama" if rng.random() < 0.5:
            scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            config["rope_parameters"] = {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "original_max_position_embeddings": 64,
                **scaling,
            }
        case "mistral":
            config["sliding_window"] = rng.choice((None, window))
        case "qwen2" | "qwen3" | "qwen3_moe" if rng.random() < 0.5:
            config |= {
                "use_sliding_window": True,
                "sliding_window": window,
                "max_window_layers": rng.randint(0, 2),
            }
        case "gemma3_text":
            kinds = ("sliding_attention", "full_attention")
            config["layer_types"] = [rng.choice(kinds) for _ in range(config["num_hidden_layers"])]
            config |= {"sliding_window": window, "query_pre_attn_scalar": rng.choice((8, 24))}
        case "olmo3":
            kinds = ("sliding_attention", "full_attention")
            config["layer_types"] = [rng.choice(kinds) for _ in range(config["num_hidden_layers"])]
            yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
            config |= {
                "sliding_window": window,
                "rope_parameters": {
                    "full_attention": {**yarn, "rope_theta": 1e4},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
                },
            }
        case "seed_oss":
            config["attention_bias"] = rng.random() < 0.7
        case "smollm3":
            layers = range(config["num_hidden_layers"])
            config["no_rope_layers"] = [rng.randint(0, 1) for _ in layers]
        case "ministral3":
            config["sliding_window"] = rng.choice((None, window))
        case "glm4_moe":
            config |= {
                "use_qk_norm": rng.random() < 0.5,
                "first_k_dense_replace": rng.randint(0, min(1, config["num_hidden_layers"] - 1)),
            }
    if family.startswith("qwen3_5"):
        # A model needs at least one layer with attention, because transformers reads the sequence's
        # length from such a layer.
        kinds = ["linear_attention", "full_attention"]
        kinds += [rng.choice(kinds) for _ in range(rng.randint(0, 2))]
        rng.shuffle(kinds)
        config |= {
            "num_hidden_layers": len(kinds),
            # A head of a delta net may read almost nothing from its state. With a smaller epsilon,
            # the norm of these small values would enlarge their rounding errors.
            "rms_norm_eps": rng.choice((1e-4, 1e-3)),
            "layer_types": kinds,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": rng.choice((4, 8)),
            "linear_key_head_dim": rng.choice((4, 8)),
            "linear_value_head_dim": rng.choice((6, 8)),
            "linear_conv_kernel_dim": rng.randint(2, 4),
        }
    if family == "qwen3_moe":
        config["norm_topk_prob"] = rng.random() < 0.7
    if family == "gpt_oss":
        config["tie_word_embeddings"] = False
    return config


def _gemma4(rng: random.Random, layers: int, tensor: int, mixture: bool) -> dict[str, Any]:
    kinds = [rng.choice(("sliding_attention", "full_attention")) for _ in range(layers)]
    config = {
        "layer_types": [*kinds[:-1], "full_attention"],
        "sliding_window": rng.randint(3, 9),
        "global_head_dim": rng.choice((16, 24)),
        "attention_k_eq_v": rng.random() < 0.7,
        "num_global_key_value_heads": rng.choice([size for size in (1, 2, 4) if size >= tensor]),
        "final_logit_softcapping": rng.choice((None, 3.0, 30.0)),
        "use_bidirectional_attention": rng.choice((None, "vision")),
    }
    return config | (GEMMA4_MOE if mixture else {})


def _tree(rng: random.Random, depth: int = 0) -> Node:
    node = Node([rng.randrange(VOCABULARY) for _ in range(rng.randint(2 if depth == 0 else 1, 9))])
    if depth < 3 and rng.random() < 0.6:
        node.children = [_tree(rng, depth + 1) for _ in range(rng.randint(2, 3))]
    return node


def _row(rng: random.Random, least: int) -> Row:
    tokens: list[int] = []
    positions: list[int] = []
    ends: dict[int, int] = {}
    items: list[Item] = []
    sequences: list[list[int]] = []

    def add(node: Node, path: list[int], parent: int | None) -> None:
        """Adds a node and its children to the row. `path`: the tokens of the nodes above. `parent`:
        the slot of the last token of `path`."""
        first, sequence = len(tokens), len(sequences)
        for number, token in enumerate(node.tokens):
            source = parent if number == 0 else first + number - 1
            if source is not None and rng.random() < 0.8:
                at = len(path) + number
                items.append(Item(first + number, source, token, rng.gauss(0.5, 1.0), sequence, at))
            tokens.append(token)
            positions.append(len(path) + number)
        whole = path + node.tokens
        for child in node.children:
            add(child, whole, first + len(node.tokens) - 1)
        if not node.children:
            sequences.append(whole)
        ends.update(dict.fromkeys(range(first, first + len(node.tokens)), len(tokens)))

    while len(tokens) < least or not items:
        add(_tree(rng), [], None)
    used, padding = len(tokens), rng.randint(0, 6)
    tensors = RowTensors(
        tokens=torch.tensor(tokens + [0] * padding),
        positions=torch.tensor(positions + [0] * padding),
        subtree_end=torch.tensor(
            [ends[slot] for slot in range(used)] + [used + i + 1 for i in range(padding)]
        ),
        item_source=torch.tensor([item.source for item in items]),
        item_token=torch.tensor([item.token for item in items]),
    )
    return Row(tensors, items, sequences)
