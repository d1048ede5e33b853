"""What moorage has on this machine, and removing all of it: for ``dev down``, a worker's start, and tests."""

from __future__ import annotations

from contextlib import suppress

from moorage.worker.network import links, namespace, rules
from moorage.worker.network.names import cluster_prefix, node_prefix, table_name


def _prefix(cluster: str, node: str) -> str:
    return node_prefix(cluster, node) if node else cluster_prefix(cluster)


def leftovers(cluster: str, node: str = "") -> list[str]:
    """What exists of ``cluster`` (of one node if given), as ``kind name``: netns, link, table.

    Namespaces are found whatever node made them, links and tables only in the calling thread's namespace.
    """
    prefix = _prefix(cluster, node)
    found = []
    with suppress(FileNotFoundError):
        found += [f"netns {path.name}" for path in sorted(namespace.FOLDER.iterdir()) if path.name.startswith(prefix)]
    with links.opened() as route:
        names = sorted(str(link.get_attr("IFLA_IFNAME")) for link in route.get_links())
    found += [f"link {name}" for name in names if name.startswith(prefix)]
    if rules.list_table("ip", table_name(cluster)):
        found.append(f"table {table_name(cluster)}")
    return found


def remove_all(cluster: str, node: str = "") -> list[str]:
    """Remove all that `leftovers` finds, and return it. Processes in the namespaces are the caller's."""
    found = leftovers(cluster, node)
    with namespace.host_lock():
        for entry in found:
            kind, _, name = entry.partition(" ")
            if kind == "netns":
                namespace.delete(namespace.FOLDER / name)
            elif kind == "link":
                with links.opened() as route:
                    links.delete(route, name)
            else:
                rules.apply(f"add table ip {name}\ndelete table ip {name}\n")
    return found
