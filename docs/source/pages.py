"""A hook of mkdocs that adds pages from outside docs/ to the site, and adapts the pages' links.

In the repository, a Markdown link is relative to the file that contains the link, as on GitHub. On
the site all pages are in one directory.
"""

import logging
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

OUTSIDE = {
    "README.md": "overview.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "reporting.md",
    "helm/tandem/README.md": "chart.md",
}
"""File in the repository → page of the site."""

LINK = re.compile(r"(!?)\[((?:[^][]|\[[^]]*\])*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^ *(```|~~~)")
log = logging.getLogger("mkdocs.hooks.pages")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    root = Path(config.config_file_path).parent
    for source, page in OUTSIDE.items():
        text = (root / source).read_text()
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: object) -> str:
    """The page's text with links to the site's pages. A link to a file that is not on the site
    becomes plain text. The file must exist."""
    root = Path(config.config_file_path).parent
    source = next(
        (file for file, name in OUTSIDE.items() if name == page.file.src_uri),
        f"docs/{page.file.src_uri}",
    )

    def on_site(match: re.Match[str]) -> str:
        image, label, target = match.groups()
        path, hash_, anchor = target.partition("#")
        if not path or "://" in path or path.startswith(("/", "mailto:")):
            return match[0]
        there = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if there in OUTSIDE:
            return f"[{label}]({OUTSIDE[there]}{hash_}{anchor})"
        if there.startswith("docs/"):
            return f"{image}[{label}]({there.removeprefix('docs/')}{hash_}{anchor})"
        if not (root / there).exists():
            log.warning("%s links to %s, which does not exist", source, target)
        return label

    lines, fenced = [], False
    for line in markdown.split("\n"):
        fenced ^= bool(FENCE.match(line))
        lines.append(line if fenced else LINK.sub(on_site, line))
    return "\n".join(lines)
