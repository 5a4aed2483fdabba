"""Who a scan is of, where names of people also name a session, or are written in several ways.

Two scans of one person under two names are two people to a split: one is trained on, the other
tested on. What studies are known to write is read as it is meant. Names that differ in nothing but
their spelling are refused, and so are those that share a stem where the whole cohort looks like
people with a few sessions each, unless a pattern says what a person's name is.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from ..errors import DataError, TableError
from ..labels import diagnosis, known_words
from .ids import PTID, canonical_session, canonical_subject, one_spelling, session_in_name

_OPTION = "--data.subject_pattern / --subject-pattern"
_SESSION = re.compile(
    r"(?:(?:ses|session|visit|v|mr|scan|tp|timepoint|time|t|wave|m|mo|month|y|yr|year|d|day"
    r"|w|wk|week|fu|followup|run)\d+|bl|base|baseline|sc|screening|followup|repeat|retest)+"
)
_DAYS = ("%Y%m%d", "%d%m%Y", "%m%d%Y", "%y%m%d", "%Y-%m-%d", "%d-%m-%Y", "%m-%d-%Y", "%d-%b-%Y")
_MONTHS = ("%Y%m", "%Y-%m")
# Cyrillic and Greek letters that nobody can tell from Latin ones
_ALIKE = str.maketrans(
    "АВЕКМНОРСТХУаеорсхуΑΒΕΖΗΙΚΜΝΟΡΤΥΧο",  # noqa: RUF001
    "ABEKMHOPCTXYaeopcxyABEZHIKMNOPTYXo",
)
_ACCENTS = re.compile("[\u0300-\u036f]")
_MANY = 8  # names of a stem: more are no sessions of a person
_TORN = 0.2  # share of stems with people of two sexes or diagnoses; tables are wrong now and then
_USUAL = 3  # the usual order of letters and digits: of every so many names, one has it
_CHANCE = 10  # so many pairs of different people hardly agree in sex or diagnosis


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
        match = re.search(self.pattern, one_spelling(name))
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


@dataclass(frozen=True)
class Named:
    """A name as a source writes it, and what is said of the person.

    Attributes:
        name: of the person.
        sex: F, M or empty.
        group: diagnosis; empty: not known.
    """

    name: str
    sex: str = ""
    group: str = ""


def refuse_two_names(people: Iterable[Named], where: str) -> None:
    """Refuse names that may be one person's.

    Either they are the same in their plain form, or one is the other with more behind it, or they
    share a stem and what follows looks like sessions over the whole cohort. The latter two are of
    different people where sex, or else the diagnosis, differs: numbers of people behind that of a
    hospital look like sessions otherwise.

    Raises:
        TableError: ``TWO_NAMES``, with the names.
    """
    spellings: dict[Runs, dict[str, Named]] = defaultdict(dict)
    of_adni: dict[Runs, Named] = {}  # one spelling already, and never one stem
    for one in people:
        if PTID.fullmatch(one.name):
            of_adni[plain_form(one.name)] = one
        elif one.name:
            spellings[plain_form(one.name)][one.name] = one
    doubles = {tuple(sorted(same)) for same in spellings.values() if len(same) > 1}
    known = {form: next(iter(same.values())) for form, same in spellings.items()}
    doubles |= {
        tuple(sorted(one.name for one in alike))
        for alike in (*_extended(known | of_adni), *_of_one_stem(known), *_behind_sessions(known))
        if not _differ(alike)
    }
    if doubles:
        shown = "; ".join(" and ".join(names[:3]) for names in sorted(doubles)[:3])
        raise TableError(
            "TWO_NAMES",
            f"{len(doubles)} people may have several names: {shown}",
            where,
            f"say what of a name is the person with {_OPTION} REGEX, whose first group it is: "
            "'^(.+)_v\\d+$' cuts a session off, '^(.+)$' says that all these are different people",
        )


def refuse_other_spelling(names: Iterable[str], known: Iterable[str], where: str) -> None:
    """Refuse names of scans that a table has in another spelling only, and so says nothing of.

    Raises:
        TableError: ``OTHER_SPELLING``, with both names.
    """
    known = {canonical_subject(name): name for name in known}
    spelled = {plain_form(name): name for name in known}
    for name in names:
        subject = canonical_subject(name)
        if subject not in known and plain_form(subject) in spelled:
            raise TableError(
                "OTHER_SPELLING",
                f"the scan of {name} has no row, and {spelled[plain_form(subject)]!r} has one",
                where,
                "write names in the table as the scans have them",
            )


Runs = tuple[str, ...]


def plain_form(name: str) -> Runs:
    """The runs of letters and of digits in a name, which are what tells people apart.

    Without case, separators, accents, zeros in front, ``.0`` and ``sub``; Cyrillic and Greek
    letters are the Latin ones that look the same.
    """
    return tuple(re.sub(r"^0+(?=\d)", "", run) for run in _runs(name))


def _runs(name: str) -> Runs:
    name = re.sub(r"\.0+$", "", _bare(name))
    name = re.sub(r"^(?:sub(?:ject|j)?[_\-]?(?=.))?(?:adni[_\-]?(?=\d))?", "", name)
    return tuple(re.findall(r"\d+|[^\W\d_]+", name))


def _bare(name: str) -> str:
    """Small letters without accents, which DICOM headers often lose."""
    name = unicodedata.normalize("NFKD", one_spelling(name).translate(_ALIKE).casefold())
    return unicodedata.normalize("NFKC", _ACCENTS.sub("", name))


def _extended(known: Mapping[Runs, Named]) -> Iterator[list[Named]]:
    """Names that are another one with more behind it: ``P17`` and ``P17 (2)``."""
    longer: dict[Runs, list[Named]] = defaultdict(list)
    for form, one in known.items():
        for end in range(1, len(form)):
            if form[:end] in known:
                longer[form[:end]].append(one)
    return ([known[stem], *own] for stem, own in longer.items() if len(own) < _MANY)


def _of_one_stem(known: Mapping[Runs, Named]) -> Iterator[list[Named]]:
    """Names of one stem, if stems are people over the whole cohort, and what follows sessions."""
    for end in range(1, max(map(len, known), default=0)):
        stems: dict[Runs, list[Named]] = defaultdict(list)
        for form, one in known.items():
            if len(form) > end:
                stems[form[:end]].append(one)
        shared = [own for own in stems.values() if len(own) > 1]
        torn = sum(map(_differ, shared))
        if not shared or torn > _TORN * len(shared) or sum(map(len, shared)) >= _MANY * len(shared):
            continue
        if _are_known(shared, end) or (_are_built_alike(known) and _are_few(stems, shared, end)):
            yield from shared


def _behind_sessions(known: Mapping[Runs, Named]) -> Iterator[list[Named]]:
    """Names behind words for sessions, or days: ``V1-P17`` and ``20190304_P17``."""
    same: dict[Runs, list[Named]] = defaultdict(list)
    for form, one in known.items():
        if end := next((n for n in range(1, min(len(form), 4)) if _begins(one, n)), 0):
            same[form[end:]].append(one)
    usual = 2 * sum(map(len, same.values())) >= len(known)
    shared = {form: own for form, own in same.items() if len(own) > 1}
    # hospitals may have names like sessions, and people the numbers of a day
    if sum(map(_differ, shared.values())) <= _TORN * len(shared):
        for form, own in shared.items():
            told = usual and all(one.sex or one.group for one in own)
            if len(own) < _MANY and (told or not all(run.isdigit() for run in form)):
                yield own


def _begins(one: Named, end: int) -> bool:
    """Whether so many runs of a name, before a separator, are a word for a session or a day."""
    first, after = _runs(one.name)[:end], _runs(one.name)[end]
    apart = re.search(rf"{first[-1]}[\W_]+{after}", _bare(one.name))
    return bool(apart) and bool(_SESSION.fullmatch("".join(first)) or _is_day(first))


def _are_known(shared: Sequence[Sequence[Named]], end: int) -> bool:
    """Whether what follows ``end`` runs and a separator are words for sessions, or days."""
    for one in (one for own in shared for one in own):
        runs, text = _runs(one.name), _bare(one.name)
        apart = re.search(rf"{runs[end - 1]}[\W_]+{runs[end]}", text)
        if not apart or not (_SESSION.fullmatch("".join(runs[end:])) or _is_day(runs[end:])):
            return False
    return True


def _are_built_alike(known: Iterable[Runs]) -> bool:
    """Whether letters and digits come in a usual order; in names drawn at random they do not."""
    orders = Counter(tuple(run.isdigit() for run in form) for form in known)
    return _USUAL * orders.most_common(1)[0][1] >= orders.total()


def _are_few(
    stems: Mapping[Runs, Sequence[Named]], shared: Sequence[Sequence[Named]], end: int
) -> bool:
    """Whether what follows ``end`` runs are the same few for many people.

    Or they are different everywhere, and yet all pairs agree in sex or diagnosis.
    """
    if not any(run.isdigit() for form in stems for run in form):
        return False  # a word and a number: numbers of people
    names = [one for own in stems.values() for one in own]
    ends = {_runs(one.name)[end:] for one in names}
    told = all(one.sex or one.group for own in shared for one in own)
    pairs = sum(map(len, shared)) < 3 * len(shared) and len(shared) >= _CHANCE and told
    few = len(ends) < len(stems) and 3 * len(ends) <= len(names)
    return pairs or (few and not all(map(_is_day, stems)))  # of one birthday may be two


def _differ(people: Sequence[Named]) -> bool:
    """Whether they cannot be one person: of two sexes or, if none is known, of two diagnoses."""
    sexes = {one.sex for one in people} - {""}
    return len(sexes or {one.group for one in people} - {""}) > 1


def _is_day(runs: Runs) -> bool:
    """Whether it may be a day of the years in which heads were scanned, with a time or without."""
    text = runs[0][:8] if runs[0].isdigit() and len(runs[0]) >= 6 else "-".join(runs[:3])
    for written in (*_DAYS, *_MONTHS):
        try:
            day = datetime.strptime(text, written)
        except ValueError:
            continue
        if 1985 <= day.year <= 2045 and len(text) != 7:
            return True
    return False
