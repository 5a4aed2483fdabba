"""How the backends say that a peer is gone, or does not answer: by the text of an error alone.

gloo raises a plain ``RuntimeError``, for a lost connection as for a wrong shape. NCCL raises
``DistBackendError`` for everything, and its watchdog names what it has ended. The texts are those
of torch 2.13; ``tests/comm/test_comm_lost_peers.py`` provokes gloo's.
"""

_GONE = (
    # gloo
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    # NCCL
    "remote process exited or there was a network error",
    "NCCL communicator was aborted",
)
_LATE = (
    # gloo; the second is what the other transfers of a pair say then
    "Timed out waiting",
    "Application timeout",
    # NCCL's watchdog
    "Watchdog caught collective operation timeout",
    "Some NCCL operations have failed or timed out",
)


def is_gone(error: BaseException) -> bool:
    """Whether a backend says with ``error`` that the connection to a peer is lost."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _GONE)


def is_late(error: BaseException) -> bool:
    """Whether a backend says with ``error`` that it gave up waiting."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _LATE)
