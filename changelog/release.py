"""Collect the files of this folder in `CHANGELOG.md` under a version, and remove them.

    python changelog/release.py [--check] VERSION

What stands there under `## Unreleased` comes under the version too. With `--check` nothing is
changed: it ends with an error where a file is not as README.md says, or where there is nothing to
release and no heading of that version.
"""

import argparse
import re
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("added", "changed", "fixed", "removed")
NAME = re.compile(rf"[a-z0-9][a-z0-9_-]*\.({'|'.join(KINDS)})\.md")


def fragments(root: Path) -> list[Path]:
    """The files of changes, by name."""
    return sorted(path for path in (root / "changelog").glob("*.md") if path.name != "README.md")


def problems(path: Path, root: Path) -> list[str]:
    """What of a file is not as README.md says."""
    if not NAME.fullmatch(path.name):
        return [f"{path.name}: its name is not NAME.KIND.md with a kind of {', '.join(KINDS)}"]
    lines = path.read_text().strip().splitlines()
    shown = re.fullmatch(r"\((.+)\)", lines[-1]) if len(lines) > 1 else None
    if shown is None:
        return [f"{path.name}: after what has changed the last line is no (TEST OR COMMAND)"]
    found = []
    if lines[0].startswith(("- ", "* ", "#")):
        found.append(f"{path.name}: begins with a bullet or a heading, which the script makes")
    for name in shown[1].split(", "):
        if not is_there(name, root):
            found.append(f"{path.name}: there is no {name!r}")
    return found


def is_there(name: str, root: Path) -> bool:
    """Whether a target of the Makefile, or the file that a command begins with, is there."""
    first, *more = name.split()
    if first != "make":
        return (root / first).is_file()
    rules = re.findall(r"^([\w-]+(?: [\w-]+)*):", (root / "Makefile").read_text(), re.M)
    return bool(more) and set(more) <= {target for rule in rules for target in rule.split()}


def entry(path: Path) -> str:
    """A file as an item of a list; its links begin in the folder above from then on."""
    lines = path.read_text().replace("](../", "](").strip().splitlines()
    return "- " + "\n  ".join(lines)


def released(text: str, version: str, date: str, paths: Iterable[Path]) -> str:
    """The changelog with these files, and what was unreleased, under a version.

    Args:
        text: of `CHANGELOG.md`.
        version: such as 0.2.0.
        date: as 2027-01-31.
        paths: of the files of changes.
    """
    before, rest = re.split(r"(?=^## )", text, maxsplit=1, flags=re.M) if "\n## " in text else (
        text, ""
    )  # fmt: skip
    heading, _, body = rest.partition("\n")
    if heading != "## Unreleased":
        body, older = "", rest
    else:
        body, *later = re.split(r"(?=^## )", body, maxsplit=1, flags=re.M)
        older = "".join(later)
    first, *parts = re.split(r"^### ", body, flags=re.M)
    sections = {name: items.strip() for name, _, items in (part.partition("\n") for part in parts)}
    for path in paths:
        kind = path.name.split(".")[1].capitalize()
        sections[kind] = f"{sections.get(kind, '')}\n{entry(path)}".strip()
    lines = [f"{before.rstrip()}\n", f"## {version} - {date}\n"]
    lines += [f"{first.strip()}\n"] if first.strip() else []
    lines += [f"### {kind}\n{items}\n" for kind, items in sections.items()]
    return "\n".join([*lines, older]).rstrip() + "\n"


def main(arguments: list[str], root: Path = ROOT) -> str | None:
    """Returns what is wrong, if anything is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version")
    parser.add_argument("--check", action="store_true", help="change nothing")
    chosen = parser.parse_args(arguments)
    paths, changelog = fragments(root), root / "CHANGELOG.md"
    text = changelog.read_text()
    if wrong := [line for path in paths for line in problems(path, root)]:
        return "\n".join(wrong)
    there = re.search(rf"^## {re.escape(chosen.version)}( |$)", text, re.M) is not None
    unreleased = re.search(r"^## Unreleased$", text, re.M) is not None
    if there and paths:
        return f"CHANGELOG.md has a heading of {chosen.version}: give these changes another version"
    if there:
        return None
    if not paths and not unreleased:
        return f"changelog/ is empty, and CHANGELOG.md has no heading of {chosen.version}"
    if not chosen.check:
        date = f"{datetime.now(UTC):%Y-%m-%d}"
        changelog.write_text(released(text, chosen.version, date, paths))
        for path in paths:
            path.unlink()
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
