"""Hooks of mkdocs, which builds the site. The pages are written to be read in the repository, too.

Nothing of the site may be loaded from another host: a script, a font or a picture from elsewhere ends the build.
A link that leads out of docs/ becomes a link to the repository. A page of the navigation that is not there yet is left
out: tests/architecture/test_site.py says which pages may be missing, and that no page is forgotten.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

LOADED = re.compile(r"<(?:script|img|iframe|link(?![^>]*rel=\"?canonical))[^>]*(?:src|href)=\"?(?:https?:)?//[^>]*>")
LINK = re.compile(r"\]\((?P<target>\.\./[^()\s#]+)(?P<rest>#[^()\s]*)?\)")


def on_config(config: Any) -> Any:
    config.nav = pruned(config.nav, Path(config.docs_dir))
    return config


def pruned(nav: list[Any], docs: Path) -> list[Any]:
    kept: list[Any] = []
    for entry in nav:
        ((title, target),) = entry.items()
        if isinstance(target, list):
            kept.append({title: pruned(target, docs)})
        elif (docs / target).exists():
            kept.append(entry)
    return kept


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    folder = posixpath.dirname(page.file.src_uri)

    def outward(match: re.Match[str]) -> str:
        place = posixpath.normpath(posixpath.join("docs", folder, match["target"]))
        if place.startswith("docs/") or place == "docs":
            return match[0]
        return f"]({config.repo_url}/blob/main/{place}{match['rest'] or ''})"

    return LINK.sub(outward, markdown)


def on_post_page(output: str, *, page: Any, config: Any) -> str:
    if (found := LOADED.search(output)) is not None:
        raise PluginError(f"{page.file.src_uri} loads something from another host: {found[0]}")
    return output
