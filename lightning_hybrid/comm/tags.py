"""Tags of wires. Over gloo they separate what passes between the same two ranks of one group.

The channels for words have the tags below :data:`TAGS_OF_A_PLACEMENT`, from 1 on, and the k-th
placement of a run (from 1) has as many from k times this number on. Those of :class:`ReservedTag`
are for what is neither.
"""

from enum import IntEnum, unique

TAGS_OF_A_PLACEMENT = 2**12


@unique
class ReservedTag(IntEnum):
    """Tags that have one use each in the group of a replica."""

    ABOUT_TO_MAKE_A_GROUP = TAGS_OF_A_PLACEMENT - 1
    """Of the bytes by which ranks wait for each other (``comm/mesh.py``)."""
    GUARD = TAGS_OF_A_PLACEMENT - 2
    """Of what the guard of NCCL sends to the next rank (``comm/nccl_guard.py``)."""
    PROBE = 2**20
    """Of a receive that nobody sends for, which shows whether the peer is connected."""
