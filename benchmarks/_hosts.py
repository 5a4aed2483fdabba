"""Hosts on one machine: network namespaces with slow cables to one switch (Linux, as root)."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from _quota import join

PATIENCE_S = 1800


def missing_tool() -> str | None:
    """What is not installed, in a sentence."""
    for tool in ("ip", "tc", "unshare"):
        if shutil.which(tool) is None:
            return f"there is no `{tool}`: apt-get install -y iproute2 util-linux"
    return None


@contextmanager
def hosts(count: int, mbit: int) -> Iterator[list[str]]:
    """Namespaces 10.88.0.1, 10.88.0.2, ...; a cable lets so many Mbit/s through, each way."""
    names = [f"hosts_{os.getpid()}_{number}" for number in range(count)]
    switch = f"hosts_{os.getpid()}_switch"
    rate = ("tbf", "rate", f"{mbit}mbit", "burst", f"{max(256, 2 * mbit)}kbit", "latency", "50ms")

    def run(*command: str) -> None:
        subprocess.run(command, check=True)

    try:
        for name in (switch, *names):
            run("ip", "netns", "add", name)
        run("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "switch", "up")
        for number, name in enumerate(names):
            cable, port = f"cable{number}", f"port{number}"
            other = ("type", "veth", "peer", "name", port, "netns", switch)
            run("ip", "link", "add", cable, "netns", name, *other)
            run("ip", "-n", name, "addr", "add", f"10.88.0.{number + 1}/24", "dev", cable)
            run("ip", "-n", switch, "link", "set", port, "master", "switch")
            run("ip", "-n", name, "link", "set", "lo", "up")
            for space, device in ((name, cable), (switch, port)):
                run("ip", "-n", space, "link", "set", device, "up")
                run("tc", "-n", space, "qdisc", "add", "dev", device, "root", *rate)
        yield names
    finally:
        for name in (switch, *names):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def run_on(
    names: Sequence[str],
    script: str,
    options: Sequence[str],
    environment: Mapping[str, str],
    groups: Sequence[Path] = (),
) -> str:
    """Run `script --rank N --out FILE` with one process on each host.

    Args:
        names: of the hosts.
        script: path of the Python script.
        options: of all processes.
        environment: of all processes.
        groups: the control group of each process, if it is to have one.

    Returns:
        What one of them has written to the file; "" if one failed, which is said on stderr.
    """
    common = os.environ | {"MASTER_ADDR": "10.88.0.1", "MASTER_PORT": "29517"} | environment
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w+") as log:
        out = Path(folder) / "found.json"
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, name in enumerate(names):
                # names of its own too: the ranks of a host are told by its name
                inside = ["ip", "netns", "exec", name, "unshare", "--uts", sys.executable, script]
                command = [*inside, *options, "--rank", str(rank), "--out", str(out)]
                own = {"NODE_RANK": str(rank), "GLOO_SOCKET_IFNAME": f"cable{rank}"}
                process = subprocess.Popen(command, env=common | own, stdout=log, stderr=log)
                processes.append(process)
                if groups:  # from here: a process on a host does not see control groups
                    join(groups[rank], process.pid)
            end_s = time.monotonic() + PATIENCE_S
            codes = [process.wait(max(1.0, end_s - time.monotonic())) for process in processes]
        finally:
            for process in processes:
                process.kill()
        if not any(codes) and out.is_file():
            return out.read_text()
        log.seek(0)
        print(f"{' '.join(options)}: {codes}: {log.read()[-2000:]}", file=sys.stderr)
        return ""
