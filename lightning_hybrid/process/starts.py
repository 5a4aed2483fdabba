"""Keep ranks apart that were started one after the other, in a store that outlives them.

An agent of torchrun hosts the store, and may start all ranks again. These would find there what the
ranks before them have written, such as the addresses of processes that have ended. No environment
variable numbers the starts alike on all hosts: each agent counts the failures of its own host
(``TORCHELASTIC_RESTART_COUNT``).
"""

import time
from datetime import timedelta
from uuid import uuid4

from torch.distributed import PrefixStore, Store

from lightning_hybrid.errors import RemoteError

_LOOK_EVERY_S = 0.02
_OFFER = "start"


def of_this_start(store: Store, rank: int, size: int, timeout: timedelta) -> Store:
    """Agree on a part of a store that only the ranks started together with this one use.

    Collective: all ranks call this together. Rank 0 offers a name for the prefix, the others answer
    with names of their own, and rank 0 confirms these names: so no rank takes an offer or an answer
    of a rank that has ended.

    Args:
        store: the store, which ranks of earlier starts have used too.
        rank: global rank of this process.
        size: number of all ranks.
        timeout: how long to wait for the other ranks.

    Returns:
        The store under a prefix that no earlier start has used.

    Raises:
        RemoteError: some ranks have not answered in time.
    """
    mine, deadline = uuid4().hex, time.monotonic() + timeout.total_seconds()
    if rank == 0:
        store.set(_OFFER, mine)
    missing = "rank 0"
    while time.monotonic() < deadline:
        if rank == 0:
            answers = {f"{mine}/{other}": other for other in range(1, size)}
            late = [other for key, other in answers.items() if not store.check([key])]
            if not late:
                names = [store.get(key).decode() for key in answers]
                store.set(f"{mine}/confirmed", " ".join(names))
                return PrefixStore(mine, store)
            missing = f"ranks {', '.join(map(str, late))}"
        elif store.check([_OFFER]):
            offered = store.get(_OFFER).decode()
            store.set(f"{offered}/{rank}", mine)
            confirmed = f"{offered}/confirmed"
            if store.check([confirmed]) and mine in store.get(confirmed).decode().split():
                return PrefixStore(offered, store)
        time.sleep(_LOOK_EVERY_S)
    raise RemoteError(
        f"Rank {rank} has waited {timeout} for {missing} of {size}, which torchrun has started "
        "together with it. Look for the first error that they print."
    )
