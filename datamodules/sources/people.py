"""Who a scan is of, where names of people also name a session, or are written in several ways.

Two scans of one person under two names are two people to a split: one is trained on, the other
tested on. What studies are known to write is read as it is meant. Names that differ in nothing but
case, leading zeros, ``.0`` or the name of a session are refused, unless a pattern says what a
person's name is.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import DataError, TableError
from ..labels import diagnosis, known_words
from .ids import PTID, canonical_session, canonical_subject, session_in_name

_OPTION = "--data.subject_pattern / --subject-pattern"
_SESSION = re.compile(
    r"[_\-. ](?:(?:ses|session|visit|v|mr|scan|tp|timepoint|time|t|wave|m|mo|month|y|yr|year|d|day"
    r"|w|wk|week|fu|followup|run)[_\-]?\d+|bl|base|baseline|sc|screening|followup|repeat|retest)$"
)


@dataclass(frozen=True)
class Names:
    """How names of people, and words of diagnoses, in a source are read.

    Attributes:
        pattern: regular expression that is searched in a name; its first group, or all that it
            matches, is the person, and a group ``session`` the session. Empty: known patterns only.
        label_column: of ``participants.tsv`` or a table of scans, that has the labels; empty: the
            usual ones.
        label_map: what words of a source stand for, ``(("HC", "NC"),)``.
    """

    pattern: str = ""
    label_column: str = ""
    label_map: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise DataError(
                "BAD_PATTERN",
                f"{self.pattern!r} is no regular expression: {error}",
                action=f"give one such as '(OAS1_\\d+)_MR\\d+' with {_OPTION}",
            ) from None
        unknown = [name for _, name in self.label_map if diagnosis(name) is None]
        if unknown:
            raise DataError(
                "BAD_LABEL_MAP",
                f"{unknown[0]!r} is none of {known_words()}",
                action="give --data.label_map / --label-map as WORD=DIAGNOSIS, such as HC=NC",
            )

    def word(self, text: str) -> str:
        """A diagnosis as this package writes it, if the source's word was given one."""
        meant = {word.strip().lower(): name for word, name in self.label_map}
        return meant.get(text.strip().lower(), text)

    def person(self, name: str) -> str:
        """The person of a name.

        Raises:
            TableError: the pattern is not in it.
        """
        return self._read(name)[0]

    def session(self, name: str) -> str:
        """The session of a name; empty if it has none."""
        return self._read(name)[1]

    def _read(self, name: str) -> tuple[str, str]:
        if not self.pattern or not name.strip():
            return canonical_subject(name), session_in_name(name)
        match = re.search(self.pattern, name.strip())
        if match is None:
            raise TableError(
                "BAD_PATTERN",
                f"the subject {name!r} has nothing of the pattern {self.pattern!r}",
                action=f"correct {_OPTION}",
            )
        found = match.groupdict().get("session") or ""
        groups = [group for group in match.groups() if group and group != found]
        return canonical_subject(groups[0] if groups else match[0]), canonical_session(
            found
        ) or found


def label_map(text: str) -> tuple[tuple[str, str], ...]:
    """``HC=NC,Patient=AD`` as pairs.

    Raises:
        DataError: a part is no pair.
    """
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    if any(not sign for _, sign, _ in pairs):
        raise DataError(
            "BAD_LABEL_MAP",
            f"{text!r}",
            action="give --data.label_map / --label-map as WORD=DIAGNOSIS, such as HC=NC",
        )
    return tuple((word.strip(), name.strip()) for word, _, name in pairs)


def refuse_two_names(subjects: Iterable[str], where: str) -> None:
    """Refuse names of people that may be one person's.

    Raises:
        TableError: ``TWO_NAMES``, with the names.
    """
    alike: dict[str, set[str]] = defaultdict(set)
    for subject in subjects:
        if subject and not PTID.fullmatch(subject):  # those are one spelling already
            alike[_plainest(subject)].add(subject)
    doubles = sorted(sorted(names) for names in alike.values() if len(names) > 1)
    if doubles:
        shown = "; ".join(" and ".join(names[:3]) for names in doubles[:3])
        raise TableError(
            "TWO_NAMES",
            f"{len(doubles)} people may have several names, which differ in case, zeros or a "
            f"session only: {shown}",
            where,
            f"say what of a name is the person with {_OPTION} REGEX, whose first group it is: "
            "'^(.+)_v\\d+$' cuts a session off, '^(.+)$' says that all these are different people",
        )


def _plainest(name: str) -> str:
    """What is left of a name without case, zeros in front, ``.0`` and a session."""
    name = re.sub(r"\.0+$", "", name.strip().lower())
    name = re.sub(r"^sub(?:ject|j)?[_\-]?(?=.)", "", name)
    while (shorter := _SESSION.sub("", name)) and shorter != name:
        name = shorter
    name = re.sub(r"[_\-. ]+", "_", name)
    return re.sub(r"(?<!\d)0+(?=\d)", "", name)
