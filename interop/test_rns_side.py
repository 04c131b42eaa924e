"""The reference endpoint of the benchmarks, against itself, with small amounts."""

from __future__ import annotations

import json
import subprocess

import pytest

from interop.harness import HERE, Peer, Workspace, free_port, stock_python, tcp_client, tcp_server

SIDE = str(HERE.parent / "scripts" / "bench" / "rns_side.py")


@pytest.mark.parametrize("discovery", [True, False], ids=["discovered mtu", "mtu 500"])
@pytest.mark.parametrize(  # ten default writers in one process tear their own links down: that is a figure, not a test
    ("workload", "writer"), [("stream", "kind"), ("stream", "default"), ("ten", "kind"), ("rpc", "kind")]
)
def test_workload_arrives_whole(space: Workspace, workload: str, writer: str, discovery: bool) -> None:
    port = free_port()
    server = space.config("server", [tcp_server(port)])
    client = space.config("client", [tcp_client(port)], link_mtu_discovery=discovery)
    # On a busy machine a default writer of the reference tears its own link down now and then.
    for _ in range(3 if writer == "default" else 1):
        with Peer([stock_python(), SIDE, "server", "--config", str(server)], server) as peer:
            command = [stock_python(), SIDE, "client", "--config", str(client), "--dest", peer.hello["dest"]]
            command += [
                "--workload",
                workload,
                "--writer",
                writer,
                "--bytes",
                "60000",
                "--calls",
                "20",
                "--warm-up",
                "5",
            ]
            done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        result = json.loads(done.stdout.splitlines()[-1])
        if result["ok"]:
            break
    assert done.returncode == 0 and result["ok"], result
    assert result["mtu"] == (16384 if discovery else 500)
    assert result["rss"] > 0 and result["server_rss"] > 0 and result["seconds"] > 0
