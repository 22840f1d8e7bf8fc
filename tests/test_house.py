"""The rules of the source tree: the allowed imports, the packages without torch, and the length of
files."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "tandem"
GROUND = {"errors", "config"}


def may_import() -> dict[str, set[str]]:
    """For each package, the packages that it may import, from the table in docs/architecture.md."""
    text = (SOURCE.parents[1] / "docs" / "architecture.md").read_text()
    table = text[text.index("| package | what it is | may import |") :].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    return {name.strip("`/"): set(allowed.split(", ")) - {"–"} for name, _, allowed in rows}


MAY_IMPORT = may_import()


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes(tree: ast.AST) -> list[ast.AST]:
    return list(ast.walk(tree))


def imports(path: Path) -> set[str]:
    """Every `tandem.…` module that a file imports, without the leading `tandem.`."""
    found: set[str] = set()
    for node in nodes(parsed(path)):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] == "tandem"
        ):
            base = node.module.removeprefix("tandem").lstrip(".")
            found |= {f"{base}.{alias.name}".lstrip(".") for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {
                a.name.removeprefix("tandem.") for a in node.names if a.name.startswith("tandem.")
            }
    return found


def imported(tree: ast.AST) -> set[str]:
    """Every module that a file imports by name."""
    found: set[str] = set()
    for node in nodes(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("room", sorted(MAY_IMPORT))
def test_a_room_imports_only_what_the_architecture_allows(room):
    allowed = MAY_IMPORT[room] | GROUND | {room}
    for path in (SOURCE / room).rglob("*.py"):
        for module in imports(path):
            if module == "__version__":
                continue
            assert any(module == a or module.startswith(a + ".") for a in allowed), (
                f"{path} imports tandem.{module}"
            )


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        (
            "tandem.client",
            ["torch", "vllm", "transformers", "numpy", "fastapi", "safetensors", "openai"],
        ),
        ("tandem.cli", ["torch", "vllm", "transformers", "numpy"]),
        (
            "tandem.client.track",
            ["torch", "vllm", "transformers", "numpy", "wandb", "mlflow", "tensorboard"],
        ),
        ("tandem.client.rl.loop", ["torch", "vllm", "transformers", "numpy", "fastapi", "openai"]),
        ("tandem.controller.app", ["torch", "vllm"]),
        ("tandem.trainer.runner.loop", ["torch", "vllm", "transformers", "lightkube"]),
        ("tandem.trainer.executor.kubernetes", ["torch", "vllm", "transformers"]),
        ("tandem.inference.publisher.publisher", ["torch", "vllm", "transformers"]),
        (
            "tandem.inference.server.middleware.guard",
            ["torch", "vllm", "pydantic", "httpx", "numpy"],
        ),
        ("tandem.inference.server.command", ["torch", "vllm", "transformers", "starlette"]),
        ("tandem.metrics.exporter", ["torch", "vllm", "transformers", "numpy", "fastapi"]),
        ("tandem.supervise.health", ["torch", "vllm", "transformers", "numpy", "fastapi", "httpx"]),
        ("tandem.supervise.up", ["torch", "vllm", "transformers"]),
    ],
)
def test_light_programs_stay_light(module, forbidden):
    code = f"import sys, {module}; print(*[m for m in {forbidden} if m in sys.modules])"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert out.stdout.split() == []


def places_of(package: str) -> list[Path]:
    """The files and directories in which `package` may be imported, from docs/architecture.md."""
    text = " ".join((SOURCE.parents[1] / "docs" / "architecture.md").read_text().split())
    (sentence,) = re.findall(rf"`{package}` is imported only in (.*?)\. ", text)
    return [SOURCE / name for name in re.findall(r"`([^`]+)`", sentence)]


@pytest.mark.parametrize("package", ["torch", "vllm"])
def test_heavy_packages_are_imported_only_where_the_architecture_says(package):
    """Imports in functions count."""
    places = places_of(package)
    assert [str(place) for place in places if not place.exists()] == []
    importers = [
        path
        for path in SOURCE.rglob("*.py")
        if any(name.split(".")[0] == package for name in imported(parsed(path)))
    ]
    outside = [path for path in importers if not {path, *path.parents} & {*places}]
    assert importers
    assert [str(path) for path in outside] == []


def module_name(path: Path) -> str:
    """A source file's module name without the leading `tandem.`; an `__init__.py` has its package's
    name."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph() -> dict[str, set[str]]:
    """For each module, the modules that it imports anywhere in its file. An imported name that is
    no module counts as an import of the package that defines the name."""
    paths = {module_name(path): path for path in SOURCE.rglob("*.py")}
    return {
        name: {module if module in paths else module.rpartition(".")[0] for module in imports(path)}
        for name, path in paths.items()
    }


def cycles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The strongly connected components of several modules, and the modules that import
    themselves."""

    def reachable(start: str) -> set[str]:
        found: set[str] = set()
        waiting = [start]
        while waiting:
            new = graph.get(waiting.pop(), set()) - found
            found |= new
            waiting += new
        return found

    after = {module: reachable(module) for module in graph}
    circular = {module for module in graph if module in after[module]}
    components = {
        frozenset(other for other in after[module] if module in after.get(other, ()))
        for module in circular
    }
    return [set(component) for component in components]


def test_no_modules_import_one_another():
    """No imports form a cycle, within a package or across packages. Imports in functions and for
    type checkers count."""
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [{"b", "c"}]
    assert cycles({"a": {"a"}, "b": {"a"}}) == [{"a"}]
    graph = import_graph()
    assert "model.layer.kernels" in graph["model.layer.sublayers"]
    assert cycles(graph) == []


def test_the_directories_of_vllms_server_stay_apart():
    """`middleware/` runs in vLLM's API server, and `worker/` runs in vLLM's workers. Other programs
    import the modules beside these two directories, so these modules load no middleware."""
    server = "inference.server"
    shared = {
        "middleware": {f"{server}.patches"},
        "worker": {f"{server}.patches", f"{server}.command"},
    }
    importers_elsewhere = {
        "middleware": set[str](),
        "worker": {f"{server}.patches", f"{server}.plugin"},
    }
    graph = import_graph()
    for name, allowed in shared.items():
        inside = {m for m in graph if f"{m}.".startswith(f"{server}.{name}.")}
        assert len(inside) > 1
        needed = {m for member in inside for m in graph[member] if m.startswith(server)}
        assert needed - inside <= allowed
        assert {m for m in graph.keys() - inside if graph[m] & inside} == importers_elsewhere[name]


def defined(tree: ast.Module) -> set[str]:
    """The public names of a module: names that it binds other than by an import, names in
    `__all__`, and names that it imports as themselves (`import a as a`)."""
    found: set[str] = set()
    for node in nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.name for alias in node.names if alias.name == alias.asname}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.TypeAlias):
            found.add(node.name.id)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            found |= set(ast.literal_eval(node.value))
    return found


def test_a_name_is_imported_from_where_it_is_defined():
    """`model.mcore` is the only exception, because it imports Megatron's names for other
    modules."""
    assert defined(ast.parse("import a, b as b\nfrom c import d\ne = 1\n__all__ = ['d']")) == {
        *("__all__", "b", "d", "e")
    }
    trees = {module_name(path): parsed(path) for path in SOURCE.rglob("*.py")}
    names = {module: defined(tree) for module, tree in trees.items()}
    for importer, tree in trees.items():
        for node in nodes(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tandem"):
                module = node.module.removeprefix("tandem").lstrip(".")
                for alias in node.names:
                    here = f"{module}.{alias.name}".lstrip(".")
                    known = here in names or alias.name in names[module]
                    assert module == "model.mcore" or known, (
                        f"{importer} imports {here}, which is defined elsewhere"
                    )


def test_every_package_has_a_rule():
    packages = {
        path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"
    }
    assert packages == set(MAY_IMPORT)
    assert len(packages) <= 16
    assert {path.name for path in SOURCE.glob("*.py")} == {
        "__init__.py",
        "__main__.py",
        "errors.py",
        "config.py",
    }


def test_every_package_says_what_it_is():
    """docs/architecture.md is the overview. The packages' docstrings have the details."""
    silent = [
        str(path) for path in SOURCE.rglob("__init__.py") if not ast.get_docstring(parsed(path))
    ]
    assert silent == []
    lines = (SOURCE.parents[1] / "docs" / "architecture.md").read_text().splitlines()
    assert len(lines) <= 200, "move details into the docstring of their package"


def docstrings(tree: ast.AST) -> list[str]:
    """The docstrings of a file's module, classes and functions."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found = [ast.get_docstring(node) for node in nodes(tree) if isinstance(node, kinds)]
    return [text for text in found if text]


def test_docstrings_begin_with_the_noun():
    """If a docstring begins with a relative clause or a pronoun, the reader has to find the noun.
    If a docstring begins with the name of an error, the reader has to find the verb: "NotFound if
    …" is "Raises NotFound if …"."""
    clause = re.compile(r"(What|Which|Where|Whose|Who|Of|Those|That) ")
    error = re.compile(r"[A-Z][a-z]+[A-Z]?\w*( \(.*?\))? (if|where|without|unless) ")
    assert clause.match("Which rows are read.")
    assert not clause.match("Whether rows are read.")
    assert error.match("NotFound (field `run`) if there is none.")
    paths = list(SOURCE.rglob("*.py"))
    texts = [(path, text) for path in paths for text in docstrings(parsed(path))]
    assert [text for _, text in texts if clause.match(text)] == []
    errors = {
        node.name for path in paths for node in parsed(path).body if isinstance(node, ast.ClassDef)
    }
    verbless = [
        (path.name, text) for path, text in texts if error.match(text) and text.split()[0] in errors
    ]
    assert verbless == []


def test_one_module_knows_the_header_of_safetensors():
    """Other modules read the header by `read_header` and write it by `lay_out`. Other modules do
    not import the package safetensors."""
    knows = re.compile(r"data_offsets|^\s*(?:from|import) safetensors\b", re.MULTILINE)
    found = [path for path in SOURCE.rglob("*.py") if knows.search(path.read_text())]
    assert [path.name for path in found] == ["safetensors_header.py"]


def test_files_are_short():
    """A source file has at most 400 lines. The linter ruff limits the statements of a function
    (`max-statements` in pyproject.toml)."""
    long = [str(p) for p in SOURCE.rglob("*.py") if len(p.read_text().splitlines()) > 400]
    assert long == [], "split these files: move what belongs together into a file of its own"


def test_lines_are_short_and_formatted():
    """No line is exempt from the formatter or from the width that ruff checks."""
    exempt = re.compile(r"#\s*fmt:\s*(skip|off)|noqa:.*E501")
    root = SOURCE.parents[1]
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=root, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.split():
        for line in (root / name).read_text().splitlines():
            assert len(line) <= 100, f"{name}: {line}"
            assert name == "tests/test_house.py" or not exempt.search(line), f"{name}: {line}"


def test_benches_and_tests_share_no_code():
    """Modules in `bench/` don't import modules of `tests/`, and modules in `tests/` don't import
    modules of `bench/`."""
    root = SOURCE.parents[1]
    listed = subprocess.run(
        ["git", "ls-files", "bench/*.py", "tests/*.py"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    of_tests = {"tests"} | {
        Path(name).parts[1].removesuffix(".py") for name in listed if name.startswith("tests/")
    }
    for name in listed:
        text = (root / name).read_text()
        forbidden = of_tests if name.startswith("bench/") else {"bench"}
        modules = {module.split(".")[0] for module in imported(ast.parse(text))}
        assert not modules & forbidden, f"{name} imports {modules & forbidden}"
        # Strings may name programs to start, or directories in which Python would find modules.
        if name.startswith("bench/"):
            assert not re.search(r"""["']tests["'/]""", text), f"{name} names tests/"
        elif name != "tests/test_house.py":
            assert not re.search(r"\bbench\.\w", text), f"{name} names a module of bench"


SAME_THING = {
    # Several programs have a function of this name.
    "main",
    # A kernel on the GPU and the same kernel on the CPU have the same name.
    *("expert_swiglu", "expert_swiglu_backward", "rms_norm", "rms_norm_backward", "split_heads"),
    *("split_heads_backward", "sum_assignments", "swiglu", "swiglu_backward"),
    # An action's command, route and function have the same name.
    *("delete_checkpoint", "delete_run", "list_checkpoints", "list_jobs", "list_runs", "plan"),
    *("track", "up"),
}
COMMANDS = {"check", "job", "read", "write", "memory", "describe"}
"""Functions of `cli/` that are commands or questions. Users type a command's name, so it need not
be unique."""


def test_a_name_stands_for_one_thing():
    """Each class and each public function of a module has a unique name."""
    places: dict[str, list[str]] = {}
    for path in SOURCE.rglob("*.py"):
        where = path.relative_to(SOURCE).as_posix()
        for node in parsed(path).body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            is_command = where.startswith("cli/") and node.name in COMMANDS
            if isinstance(node, ast.ClassDef) or not (node.name.startswith("_") or is_command):
                places.setdefault(node.name.lstrip("_"), []).append(where)
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert {name: twice[name] for name in twice.keys() - SAME_THING} == {}
    assert twice.keys() >= SAME_THING, "remove what no longer stands twice"


def test_no_requirement_is_named_by_a_number():
    """Labels such as "R" and a number in parentheses are defined nowhere in the repository."""
    tag = re.compile(r"\(R\d+\)")
    for path in [*SOURCE.rglob("*.py"), *(SOURCE.parents[1] / "tests").rglob("*.py")]:
        assert not tag.search(path.read_text()), path


def test_no_mirror_and_no_path_of_a_machine_is_named():
    root = SOURCE.parent.parent
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True
    ).stdout.split()
    hosts = set()
    for line in (root / "uv.lock").read_text().splitlines():
        for word in line.split('"'):
            if word.startswith(("http://", "https://")):
                hosts.add(word.split("/")[2])
    assert hosts == {"pypi.org", "files.pythonhosted.org"}
    for name in tracked:
        path = root / name
        if (
            path.suffix in {".py", ".md", ".toml", ".yml", ".yaml", ".sh"}
            and path.name != Path(__file__).name
        ):
            assert "/root/" not in path.read_text(), name
