"""Names of other packages that Tandem replaces. An upgrade of another package may turn a
replacement into a bug, so `PATCHES` lists all replacements. Only four files replace names. The
tests find all replacements in the source by themselves."""

import ast
import re
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "tandem"

VLLM, TORCH = "inference/server/patches.py", "model/device/patches.py"
AGENT, CONTROLLER = "trainer/launch/torchrun_agent.py", "controller/__main__.py"
NO_HOOK = "never: vLLM has no hook"

PATCHES = [
    # Each entry has the package, the replaced name, Tandem's file, and the package's version from
    # which the patch is not needed any more. A name that begins with `object` is an attribute of an
    # object that a variable holds. In place of the version, an entry may have `never` and the
    # reason why the patch stays, or `open` and the package's problem that is not solved yet.
    ("torch", "torch.compile", TORCH, "never: Megatron-core compiles while it is imported"),
    ("torch", "torch.cuda._cached_device_count", TORCH, "2.13"),
    ("torch", "torch.distributed.TCPStore", AGENT, "never: torchrun listens on all interfaces"),
    (
        "torch",
        "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend.TCPStore",
        AGENT,
        "never: torchrun listens on all interfaces",
    ),
    (
        "torch",
        "sys.modules[torch]",
        CONTROLLER,
        "never: transformers imports an installed torch along with a tokenizer",
    ),
    (
        "vllm",
        "vllm.v1.worker.gpu_worker.Worker.load_model",
        VLLM,
        f"{NO_HOOK} between the model's loading and the measurement of memory",
    ),
    ("vllm", "object runner.load_model", VLLM, f"{NO_HOOK} within its memory pool for weights"),
    (
        "vllm",
        "vllm.v1.engine.core.EngineCore.collective_rpc",
        VLLM,
        f"{NO_HOOK} in the engine between two steps",
    ),
    (
        "vllm",
        "vllm.v1.engine.core.EngineCore.preprocess_add_request",
        VLLM,
        "never: a thread hashes a request's blocks, maybe before a swap",
    ),
    (
        "vllm",
        "vllm.v1.engine.core.EngineCore.add_request",
        VLLM,
        "never: a thread hashes a request's blocks, maybe before a swap",
    ),
    (
        "vllm",
        "vllm.v1.core.kv_cache_utils.NONE_HASH",
        VLLM,
        "never: vLLM forgets cached blocks only where no request runs",
    ),
    ("vllm", "object engine.add_request", VLLM, f"{NO_HOOK} where the engine gets a request"),
    (
        "vllm",
        "object renderer.render_messages_async",
        VLLM,
        f"{NO_HOOK} between a chat's messages and its token ids",
    ),
    ("vllm", "object engine.generate", VLLM, f"{NO_HOOK} that has the tokens of all routes"),
    (
        "vllm",
        "vllm.v1.engine.logprobs.LogprobsProcessor.from_new_request",
        VLLM,
        "open: log-probs without the tokens' texts",
    ),
    (
        "vllm",
        "vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm",
        VLLM,
        "open: an option for plain weights on the CPU",
    ),
    (
        "vllm",
        "vllm.model_executor.layers.fused_moe.experts.cpu_moe.CPUUnquantizedExperts"
        ".process_weights_after_loading",
        VLLM,
        "open: an option for plain weights on the CPU",
    ),
    (
        "vllm",
        "vllm.model_executor.layers.fused_moe.experts.cpu_moe.CPUUnquantizedExperts.apply",
        VLLM,
        "open: an option for plain weights on the CPU",
    ),
    (
        "vllm",
        "vllm.v1.core.sched.scheduler.Scheduler.update_from_output",
        VLLM,
        f"{NO_HOOK} between the scheduler's outputs and their encoding",
    ),
    (
        "vllm",
        "vllm.v1.engine.core.EngineCoreProc.run_engine_core",
        VLLM,
        f"{NO_HOOK} where a forked engine begins",
    ),
    (
        "vllm",
        "vllm.v1.engine.utils.get_mp_context",
        VLLM,
        "never: vLLM's API server spawns its engine, whatever VLLM_WORKER_MULTIPROC_METHOD says",
    ),
    (
        "vllm",
        "vllm.v1.worker.gpu_worker.Worker.add_lora",
        VLLM,
        "open: the executor reads every worker's answer where one raises (0.32 does not)",
    ),
    (
        "vllm",
        "vllm.v1.executor.abstract.Executor.add_lora",
        VLLM,
        "open: the executor reads every worker's answer where one raises (0.32 does not)",
    ),
    (
        "uvicorn",
        "uvicorn.config.HTTP_PROTOCOLS[auto]",
        VLLM,
        "open: vLLM passes a protocol class, or uvicorn bounds headers (0.54 does not)",
    ),
    (
        "flashinfer",
        "sys.modules[flashinfer]",
        VLLM,
        "open: vLLM asks has_flashinfer before all-reduce and attention (0.32 does not)",
    ),
    (
        "vllm",
        "vllm.model_executor.layers.fused_moe.config.FusedMoEConfig.__post_init__",
        VLLM,
        "open: experts without adapters run without kernels for adapters (0.32: with them)",
    ),
    *(
        (
            "vllm",
            f"vllm.lora.{module}.{name}",
            VLLM,
            "open: on the CPU, an adapter is multiplied once, by its own tokens (0.32: copied for"
            " each token)",
        )
        for module in ("ops.torch_ops.lora_ops", "punica_wrapper.punica_cpu")
        for name in ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")
    ),
]

DOCUMENTED = {
    # The packages' own documentation tells users to set these names.
    ("controller/app.py", "object app.openapi"),
    ("trainer/rank/train.py", "torch.utils.deterministic.fill_uninitialized_memory"),
}


class Finder:
    """The assignments in one file to names of other packages, and the assignments of methods to
    objects."""

    def __init__(self, source: str, modules: dict[str, dict[str, str]] | None = None) -> None:
        """`modules`: the imported names of each of Tandem's modules."""
        self._tree, modules = ast.parse(source), modules or {}
        self._names: dict[str, set[str]] = {}
        for name, path in imported(self._tree):
            module, _, attribute = path.rpartition(".")
            path = modules.get(module, {}).get(attribute, path)
            self._names.setdefault(name, set()).add(path)
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        self._own = {node.name for node in ast.walk(self._tree) if isinstance(node, functions)}
        before = -1
        while before != (before := sum(map(len, self._names.values()))):
            for node in ast.walk(self._tree):
                self._follow(node)

    def patches(self) -> set[str]:
        found: set[str] = set()
        for node in ast.walk(self._tree):
            for target, value in assignments(node):
                if names := self._paths(target):
                    found |= {name for name in names if self._foreign(name)}
                elif isinstance(target, ast.Attribute) and self._is_method(target, value):
                    found.add(f"object {ast.unparse(target)}")
            if isinstance(node, ast.Call):
                found |= {name for name in self._called(node) if self._foreign(name)}
        return found

    def _follow(self, node: ast.AST) -> None:
        """Records each new name that a statement gives to an object of another package."""
        pairs: list[tuple[ast.expr, ast.expr]] = []
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            pairs = [(node.target, node.value)]
        elif isinstance(node, (ast.For, ast.comprehension)):
            elements = node.iter.elts if isinstance(node.iter, (ast.Tuple, ast.List)) else []
            pairs = [(node.target, element) for element in elements]
        for target, value in pairs:
            for one, of in zip(*spread(target, value), strict=True):
                if isinstance(one, ast.Name) and (paths := self._paths(of)):
                    self._names.setdefault(one.id, set()).update(paths)

    def _paths(self, node: ast.expr) -> set[str]:
        """The dotted names of other packages that an expression may mean. The set is empty if the
        expression means no such name."""
        match node:
            case ast.Name(id=name):
                return self._names.get(name, set())
            case ast.Attribute(value=of, attr="__dict__"):
                return self._paths(of)
            case ast.Attribute(value=of, attr=name):
                return {f"{path}.{name}" for path in self._paths(of)}
            case ast.Subscript(value=of, slice=key):
                if isinstance(of, ast.Call) or "__dict__" in ast.unparse(of):
                    return {f"{path}.{constant(key)}" for path in self._paths(of)}
                return {f"{path}[{constant(key)}]" for path in self._paths(of)}
            case ast.Call(func=ast.Name(id="vars"), args=[of]):
                return self._paths(of)
            case ast.Call(func=ast.Name(id="cast"), args=[_, of]):
                return self._paths(of)
            case ast.Call(func=ast.Name(id="getattr"), args=[of, key, *_]):
                return {f"{path}.{constant(key)}" for path in self._paths(of)}
            case ast.Call(func=called, args=[ast.Constant(value=str(module)), *_]):
                return {module} if "importlib.import_module" in self._paths(called) else set()
        return set()

    def _is_method(self, target: ast.Attribute, value: ast.expr | None) -> bool:
        """Whether a function of this file becomes a method of an object that is not `self`."""
        if isinstance(target.value, ast.Name) and target.value.id in ("self", "cls"):
            return False
        match value:
            case ast.Lambda():
                return True
            case ast.Name(id=name):
                return name in self._own
            case ast.Call(func=called, args=[first, *_]):
                name = ast.unparse(called).rpartition(".")[2]
                wraps = name in ("partial", "partialmethod", "staticmethod", "classmethod")
                return wraps and (name.startswith("partial") or self._is_method(target, first))
        return False

    def _called(self, call: ast.Call) -> set[str]:
        """Names that a call sets or deletes."""
        match call:
            case ast.Call(
                func=ast.Name(id="setattr" | "delattr")
                | ast.Attribute(attr="__setattr__" | "__delattr__"),
                args=[of, key, *_],
            ):
                return {f"{path}.{constant(key)}" for path in self._paths(of)}
            case ast.Call(func=ast.Attribute(value=of, attr="update" | "setdefault" | "pop")):
                text = ast.unparse(of)
                if self._paths(of) == {"sys.modules"} or "__dict__" in text or "vars(" in text:
                    return {f"{path}.?" for path in self._paths(of)}
        return set()

    @staticmethod
    def _foreign(path: str) -> bool:
        """Whether the name belongs to another package. `os.environ` counts as this process's
        own."""
        return not path.startswith(("tandem", "os.environ"))


def constant(key: ast.expr) -> str:
    return str(key.value) if isinstance(key, ast.Constant) else "?"


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Each imported name, with the object that it stands for. Two functions may import different
    objects by the same name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                yield name, alias.name if alias.asname else name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """The attributes and items that a statement sets or deletes, each with its value."""
    targets: list[tuple[ast.expr, ast.expr | None]] = []
    match node:
        case ast.Assign(targets=several, value=value):
            targets = [pair for each in several for pair in zip(*spread(each, value), strict=True)]
        case ast.AugAssign(target=target, value=value) | ast.AnnAssign(target=target, value=value):
            targets = [(target, value)]
        case ast.Delete(targets=several):
            targets = [(each, None) for each in several]
        case ast.For(target=target) | ast.AsyncFor(target=target):
            targets = [(target, None)]
        case ast.withitem(optional_vars=ast.expr() as target):
            targets = [(target, None)]
    for target, value in targets:
        if isinstance(target, (ast.Attribute, ast.Subscript)):
            yield target, value


def spread(target: ast.expr, value: ast.expr) -> tuple[list[ast.expr], list[ast.expr]]:
    """`a, b = x, y` as two assignments."""
    if not isinstance(target, (ast.Tuple, ast.List)):
        return [target], [value]
    if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts):
        return target.elts, value.elts
    return target.elts, [value] * len(target.elts)


def modules() -> dict[str, dict[str, str]]:
    """The imported names of each of Tandem's modules."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        found[name] = dict(imported(ast.parse(path.read_text())))
    return found


def test_every_patch_is_listed() -> None:
    known = modules()
    found = {
        (str(path.relative_to(SOURCE)), name)
        for path in SOURCE.rglob("*.py")
        for name in Finder(path.read_text(), known).patches()
    }
    listed = {(file, name) for _, name, file, _ in PATCHES}
    assert found - DOCUMENTED - listed == set(), "list it, with the version from which it can go"
    assert (listed | DOCUMENTED) - found == set(), "it is gone: take it off the list"
    assert len({file for file, _ in listed}) <= 4


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import torch\ntorch.compile = f", {"torch.compile"}),
        ("import torch as t\nt.cuda.a, x = f, 1", {"torch.cuda.a"}),
        ("import a.b\na.b.C.d: int = 1", {"a.b.C.d"}),
        ("from a.b import C\ndel C.d", {"a.b.C.d"}),
        ("from a import C\nC.d += 1", {"a.C.d"}),
        ("from a import b, c\nfor m in (b, c):\n m.d = 1", {"a.b.d", "a.c.d"}),
        ("from a import b\nfor m in (b,):\n vars(m)['d'] = 1", {"a.b.d"}),
        ("import a\na.__dict__['d'] = 1", {"a.d"}),
        ("import a\na.__dict__.update(d=1)", {"a.?"}),
        ("import a\nvars(a).update(d=1)", {"a.?"}),
        ("import a\nsetattr(a.b, 'd', 1)", {"a.b.d"}),
        ("import a\nfor n in 'xy': setattr(a, n, 1)", {"a.?"}),
        ("import a\ntype.__setattr__(a.B, 'd', 1)", {"a.B.d"}),
        ("import sys\nsys.modules['a'] = None", {"sys.modules[a]"}),
        ("import sys\nm: dict = sys.modules\nm['a'] = None", {"sys.modules[a]"}),
        ("import a\nb = a.b\nc = b.c\nc.d = 1", {"a.b.c.d"}),
        ("import a\ncast(Any, a).d = 1", {"a.d"}),
        ("import a\ngetattr(a, 'b').d = 1", {"a.b.d"}),
        ("from importlib import import_module\nimport_module('a.b').d = 1", {"a.b.d"}),
        ("import importlib as i\nm = i.import_module('a')\nm.d = 1", {"a.d"}),
        ("with open('x') as f: pass\nimport a\nwith f as a.b: pass", {"a.b"}),
        ("import a\nx = (m := a)\nm.d = 1", {"a.d"}),
        ("def p(x):\n def f(): pass\n x.y.z = f", {"object x.y.z"}),
        ("def p(x): x.y = lambda: 1", {"object x.y"}),
        ("class A:\n def p(self):\n  def f(): pass\n  self.of.y = f", {"object self.of.y"}),
        ("def p(x): x.y = functools.partial(f, 1)", {"object x.y"}),
        ("from tandem.model.mcore import random\nrandom.a = 1", {"megatron.core.random.a"}),
        ("from tandem.spool import fs\nfs.a = 1", set()),
        ("import os\nos.environ['A'] = '1'\nos.environ |= {}\nos.environ.update(a=1)", set()),
        ("from a import B\nB(x=1)['d'] = 1\nb = B()\nb.c = 1", set()),
        ("class A:\n def p(self): self.x = lambda: 1", set()),
        ("def f():\n import a as m\n m.x = 1\ndef g():\n import b as m", {"a.x", "b.x"}),
        ("import a\nsys.modules.update(a=1)", set()),
        ("import sys\nsys.modules.update(a=1)", {"sys.modules.?"}),
        ("import a\nd = {}\nd['a'] = a\nx = a.b\nx = 1", set()),
    ],
)
def test_the_finder_finds_what_replaces_a_name(source: str, names: set[str]) -> None:
    known = {"tandem.model.mcore": {"random": "megatron.core.random"}}
    assert Finder(source, known).patches() == names


def oldest(package: str) -> tuple[int, ...]:
    """The oldest version of a package that pyproject.toml allows."""
    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())["project"]
    for needs in project["optional-dependencies"].values():
        for need in needs:
            if match := re.match(rf"{package}>=([0-9.]+)", need):
                return version(match[1])
    raise AssertionError(f"pyproject.toml has no oldest version of {package}")


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


@pytest.mark.parametrize(("package", "name", "file", "until"), PATCHES, ids=[p[1] for p in PATCHES])
def test_a_patch_is_still_needed_and_its_name_still_there(
    package: str, name: str, file: str, until: str
) -> None:
    """A name that the other package no longer has would be set without an effect."""
    assert re.fullmatch(r"(never|open): .+|[0-9.]+", until), until
    if until[0].isdigit():
        assert oldest(package) < version(until), f"{file} need not replace {name} any more"
    if not name.startswith(package) or (spec := find_spec(package)) is None:
        return
    assert spec.origin is not None
    place, last = Path(spec.origin).parent, name.rpartition(".")[2].partition("[")[0]
    for part in name.split(".")[1:]:
        if (place / part).is_dir():
            place /= part
        elif (place / f"{part}.py").is_file():
            place = place / f"{part}.py"
    text = (place if place.is_file() else place / "__init__.py").read_text()
    assert re.search(rf"\b{last}\b", text), f"{place} has no {last}"
