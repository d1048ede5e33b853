"""The record of an embedded cluster: names, addresses, networks, and how it is found again."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import pytest

from moorage.dev import cluster as dev
from moorage.dev import layout, ready
from moorage.dev.layout import Cluster, check_name, cluster_id, free_subnet
from moorage.dev.supervisor import Running
from moorage.errors import CorruptData, NewerVersion, NotFound, UsageError


def cluster(state: Path = Path("/state"), name: str = "dev") -> Cluster:
    return Cluster(
        name=name,
        state=str(state),
        subnet="10.231.5.0/24",
        etcd_port=1,
        etcd_peer_port=2,
        coordinator_port=3,
        lease_seconds=5,
    )


def test_nodes_are_numbered_and_a_number_is_never_used_again() -> None:
    made = cluster()
    first, second = made.new_node(), made.new_node()
    assert (first.name, first.address) == ("node-1", "10.231.5.11")
    assert (second.name, second.address) == ("node-2", "10.231.5.12")
    made.nodes.remove(second)
    third = made.new_node()
    assert (third.name, third.address) == ("node-3", "10.231.5.13")
    assert made.gateway == "10.231.5.1"
    assert third.worker_endpoint() == "10.231.5.13:7400"


def test_a_cluster_whose_addresses_are_used_up_says_so() -> None:
    made = cluster()
    made.next_number = 245
    with pytest.raises(UsageError, match="used up its addresses"):
        made.new_node()


def test_names_of_links_fit_and_differ_between_clusters_and_nodes() -> None:
    one, other = cluster(name="a" * 32), cluster(name="b")
    one.next_number = other.next_number = 200
    links = [made.link(made.new_node()) for made in (one, one, other)] + [one.bridge, other.bridge]
    assert len(set(links)) == len(links)
    assert all(len(link) <= 15 for link in links)


def test_an_unknown_node_is_named_beside_the_known_ones() -> None:
    made = cluster()
    made.new_node()
    with pytest.raises(NotFound, match="no node node-9") as caught:
        made.node("node-9")
    assert "node-1" in caught.value.hint


@pytest.mark.parametrize("name", ["dev", "a", "test-1", "0", "a" * 32])
def test_good_names_are_taken(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name", ["", "Dev", "a/b", "..", "-a", "a-", "a" * 33, "a b", "client.toml", "MACHINE", "locks_"]
)
def test_names_that_cannot_stand_in_paths_and_keys_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="no name for a cluster"):
        check_name(name)


def test_a_subnet_is_chosen_that_overlaps_nothing() -> None:
    assert free_subnet([]) == "10.231.0.0/24"
    assert free_subnet(["10.231.0.0/24", "10.231.1.7/32", "192.168.0.0/16"]) == "10.231.2.0/24"
    assert free_subnet(["10.231.0.0/16", "0.0.0.0/0", "fe80::1/64"]) == "10.230.0.0/24"
    assert free_subnet(["10.231.0.200/30"]) == "10.231.1.0/24"
    with pytest.raises(UsageError, match="no network"):
        free_subnet(["10.0.0.0/8"])


def test_the_state_file_is_read_back_and_private(tmp_path: Path) -> None:
    made = cluster(tmp_path)
    made.new_node()
    made.write()
    assert layout.read(tmp_path) == made
    assert (tmp_path / "cluster.json").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.json"]


def test_a_state_file_that_is_missing_damaged_or_newer_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no dev cluster"):
        layout.read(tmp_path)
    (tmp_path / "cluster.json").write_text('{"name": "dev"')
    with pytest.raises(CorruptData, match="damaged"):
        layout.read(tmp_path)
    newer = msgspec.to_builtins(cluster(tmp_path)) | {"version": layout.VERSION + 1}
    (tmp_path / "cluster.json").write_bytes(msgspec.json.encode(newer))
    with pytest.raises(NewerVersion):
        layout.read(tmp_path)


def test_clusters_are_found_by_their_links_and_by_default_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "RUN_FOLDER", tmp_path / "run")
    monkeypatch.setattr(layout, "DEFAULT_FOLDER", tmp_path / "default")
    for folder in (tmp_path / "run", tmp_path / "elsewhere", tmp_path / "default" / "dev"):
        folder.mkdir(parents=True)
    cluster(tmp_path / "elsewhere", "other").write()
    cluster(tmp_path / "default" / "dev").write()  # its link is gone: the machine was started anew
    (tmp_path / "run" / "other").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "run" / "client.toml").symlink_to(tmp_path / "elsewhere" / "client.toml")
    assert layout.names() == ["dev", "other"]
    assert layout.find("other").state == str(tmp_path / "elsewhere")
    assert layout.find("dev").state == str(tmp_path / "default" / "dev")
    with pytest.raises(NotFound, match="called third") as caught:
        layout.find("third")
    assert "dev, other" in caught.value.hint


def test_a_lock_is_held_by_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "RUN_FOLDER", tmp_path)
    got = threading.Event()

    def take() -> None:
        with layout.locked("name"):
            got.set()

    other = threading.Thread(target=take)
    with layout.locked("name"), layout.locked("another"):
        other.start()
        assert not got.wait(0.2)
    assert got.wait(30)
    other.join()


def test_a_lock_whose_file_was_removed_by_its_holder_is_still_held_by_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "RUN_FOLDER", tmp_path)
    inside: list[int] = []
    overlaps: list[int] = []

    def take(number: int) -> None:
        for _ in range(50):
            with layout.locked("name"):
                inside.append(number)
                overlaps.extend(inside[1:])
                inside.remove(number)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert overlaps == []
    assert list((tmp_path / "locks").iterdir()) == []


def test_the_lock_of_a_cluster_that_is_there_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "RUN_FOLDER", tmp_path)
    with layout.locked("there"):
        (tmp_path / "there").symlink_to(tmp_path)
    with pytest.raises(NotFound), layout.locked("never"):
        raise NotFound("no such cluster")
    with layout.locked(layout.MACHINE):
        pass
    assert {path.name for path in (tmp_path / "locks").iterdir()} == {"there", layout.MACHINE}


def test_cluster_ids_are_short_and_stable() -> None:
    assert cluster_id("dev") == cluster_id("dev") != cluster_id("dev2")
    assert len(cluster_id("dev")) == 6


def test_only_a_process_that_is_wanted_and_started_over_and_over_counts_as_failing() -> None:
    roles = {
        "etcd": Running(pid=1, started=1, wanted=True, starts=1),
        "coordinator": Running(pid=0, started=0, wanted=True, starts=ready.TOO_MANY_STARTS),
        "node-1": Running(pid=0, started=0, wanted=False, starts=9),
    }
    assert ready.failing(roles) == ["coordinator"]


@pytest.mark.parametrize(
    ("leading", "live", "said"), [(False, 0, "coordinator"), (True, 1, "1 of 3 nodes"), (True, 3, "3 of 3 nodes")]
)
def test_progress_says_what_is_waited_for(leading: bool, live: int, said: str) -> None:
    assert said in ready.describe(leading, live, 3)


def test_a_cluster_that_nobody_may_use_unnamed_is_not_given_the_link_of_one_that_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "RUN_FOLDER", tmp_path / "run")
    monkeypatch.setattr(layout, "DEFAULT_FOLDER", tmp_path / "default")
    link = tmp_path / "run" / "client.toml"
    monkeypatch.setattr(dev, "DEV_CLIENT_FILE", str(link))
    made = {name: cluster(tmp_path / "default" / name, name) for name in ("dev", "other", "tests")}
    made["tests"].default = False
    for one in made.values():
        one.folder.mkdir(parents=True)
        one.write()
        (one.folder / "client.toml").touch()
    link.parent.mkdir()
    link.symlink_to(made["dev"].folder / "client.toml")
    dev._unlink_default(made["dev"])
    assert link.readlink() == made["other"].folder / "client.toml"
    (made["dev"].folder / "client.toml").unlink()
    dev._unlink_default(made["other"])
    assert not link.is_symlink()


def test_the_way_to_take_a_cluster_down_names_it_unless_it_is_the_usual_one() -> None:
    assert cluster().how_down == "moorage dev down"
    assert cluster(name="z").how_down == "moorage dev down --name z"
