from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.errors import Fenced
from moorage.worker.pod_fence import Seen, admit, check_epoch, confirm, forget, learn

orders = st.lists(st.tuples(st.integers(1, 5), st.sampled_from("ab"), st.integers(1, 5)), max_size=30)


@given(orders)
def test_accepted_orders_never_go_back_in_epoch_or_incarnation(sequence: list[tuple[int, str, int]]) -> None:
    seen = Seen()
    accepted: list[tuple[int, str, int]] = []
    for epoch, job, incarnation in sequence:
        try:
            seen = admit(seen, epoch=epoch, job=job, incarnation=incarnation)
        except Fenced:
            stale = any(epoch < e for e, _, _ in accepted)
            stale |= any(incarnation < i for _, j, i in accepted if j == job)
            assert stale
        else:
            accepted.append((epoch, job, incarnation))
    assert [e for e, _, _ in accepted] == sorted(e for e, _, _ in accepted)
    for job in "ab":
        of_job = [i for _, j, i in accepted if j == job]
        assert of_job == sorted(of_job)


def test_the_refusal_names_both_numbers() -> None:
    seen = learn(Seen(), epoch=7, job="j1", incarnation=3)
    with pytest.raises(Fenced, match=r"epoch 6.*epoch 7"):
        check_epoch(seen, 6)
    with pytest.raises(Fenced, match=r"incarnation 2 of job j1.*incarnation 3"):
        admit(seen, epoch=7, job="j1", incarnation=2)


def test_what_etcd_says_raises_but_never_lowers() -> None:
    seen = learn(Seen(), epoch=7, job="j1", incarnation=3)
    assert learn(seen, epoch=2, job="j1", incarnation=1) == seen
    assert learn(seen, job="j2", incarnation=1).incarnations == {"j1": 3, "j2": 1}


def test_a_forgotten_job_leaves_the_epoch() -> None:
    assert forget(learn(Seen(), epoch=7, job="j1", incarnation=3), "j1") == Seen(7, {})


def test_only_the_current_incarnation_is_confirmed() -> None:
    confirm(3, 3, "j1")
    with pytest.raises(Fenced, match="etcd holds incarnation 4"):
        confirm(4, 3, "j1")
    with pytest.raises(Fenced, match="does not know the job"):
        confirm(0, 3, "j1")
