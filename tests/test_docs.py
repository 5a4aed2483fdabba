"""The documentation's links lead somewhere."""

import re
import subprocess
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[1]
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
LINK = re.compile(r"\]\(<?([^)\s>]+)>?\)")
HEADING = re.compile(r"^#+ +(.+?) *#*$", re.MULTILINE)


def committed() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    found = listed.stdout.split() or [str(p.relative_to(ROOT)) for p in ROOT.glob("docs/*.md")]
    return [name for name in found if (ROOT / name).is_file()]


@cache
def anchors(page: Path) -> set[str]:
    """Of each heading, as GitHub makes them: lower case, without marks, hyphens for spaces."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    found: set[str] = set()
    for heading in HEADING.findall(text):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        again = sum(name == other or other.startswith(f"{name}-") for other in found)
        found.add(f"{name}-{again}" if name in found else name)
    return found


@pytest.mark.parametrize("name", committed())
def test_relative_links_and_their_anchors_exist(name: str) -> None:
    page = ROOT / name
    broken = []
    for link in LINK.findall(CODE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []
