"""Who writes: one at a time, by request, grant, take and yield; the time is passed in."""

from __future__ import annotations

import pytest

from criuctl.session.holder.operators import Authority, Operator, Refused


@pytest.fixture
def authority() -> Authority:
    return Authority()


def join(
    authority: Authority, kind: str = "human", role: str = "write", name: str = ""
) -> Operator:
    return authority.join(kind, name or f"{kind}{authority.serial}", role, pid=1, since=0.0)


def test_one_writes_and_the_refusal_names_it(authority: Authority) -> None:
    one, two = join(authority), join(authority)
    assert authority.request(one, 30, now=0)
    assert not authority.request(one, 30, now=1)
    with pytest.raises(Refused) as refused:
        authority.request(two, 30, now=2)
    assert (refused.value.code, refused.value.details["holder"]) == ("lease-held", one.who())
    assert authority.release(one) and not authority.release(one)
    assert authority.request(two, 30, now=3)


def test_a_soft_lease_is_given_up_when_its_holder_pauses(authority: Authority) -> None:
    one, two = join(authority), join(authority)
    authority.request(one, 30, now=10, soft=True)
    with pytest.raises(Refused):
        authority.request(two, 30, now=10, polite=True)  # who only attaches
    authority.wrote = 10.0
    with pytest.raises(Refused):
        authority.request(two, 30, now=10.9, soft=True)
    assert authority.request(two, 30, now=11, soft=True)
    assert not authority.request(two, 30, now=11)  # and now it asks to keep it
    assert not authority.request(two, 30, now=12, soft=True)
    assert not authority.soft
    with pytest.raises(Refused):
        authority.request(one, 30, now=20)


def test_it_expires_with_its_holders_heartbeat(authority: Authority) -> None:
    one, two = join(authority), join(authority)
    authority.request(one, 10, now=0)
    authority.touch(one, now=8)
    authority.touch(two, now=9)  # no heartbeat of his
    assert authority.expired(now=17) is None
    assert authority.expired(now=18) is one
    assert authority.request(two, 10, now=18)


@pytest.mark.parametrize(
    ("kind", "role", "other", "may"),
    [
        ("human", "write", "agent", True),
        ("human", "write", "service", True),
        ("human", "write", "human", False),
        ("agent", "write", "agent", False),
        ("agent", "write", "human", False),
        ("agent", "admin", "human", True),
        ("human", "admin", "human", True),
    ],
)
def test_which_operator_may_take_the_lease_of_another(
    authority: Authority, kind: str, role: str, other: str, may: bool
) -> None:
    taker, writer = join(authority, kind, role), join(authority, other)
    authority.request(writer, 30, now=0)
    if may:
        assert authority.take(taker, 30, now=1) is writer
        assert authority.holder == taker.id
    else:
        with pytest.raises(Refused, match="only an admin"):
            authority.take(taker, 30, now=1)
        assert authority.holder == writer.id


def test_grants(authority: Authority) -> None:
    admin, writer, other, observer = (
        join(authority, role="admin"),
        join(authority),
        join(authority),
        join(authority, role="observe"),
    )
    authority.request(writer, 30, now=0)
    with pytest.raises(Refused, match="only an admin or the holder"):
        authority.grant(other, other.id, now=0)
    with pytest.raises(Refused, match="may only observe"):
        authority.grant(admin, observer.id, now=0)
    with pytest.raises(Refused, match="no operator"):
        authority.grant(admin, "op-99", now=0)
    assert authority.grant(writer, other.id, now=0) is other
    assert authority.grant(admin, admin.id, now=0) is admin


def test_the_queue_is_served_in_order_without_those_who_left(authority: Authority) -> None:
    writer, gone, demoted, heir = (join(authority) for _ in range(4))
    authority.request(writer, 30, now=0)
    authority.queue.extend((operator.id, 5.0) for operator in (gone, demoted, heir))
    gone.connected = False
    demoted.role = "observe"
    authority.release(writer)
    assert authority.next_in_queue(now=1) is heir and not authority.queue
    assert authority.expires == 6


def test_a_lost_connection_keeps_the_lease_until_another_asks(authority: Authority) -> None:
    one, two = join(authority), join(authority)
    authority.request(one, 30, now=0)
    one.connected = False
    assert authority.comes_back(one.id, "wrong", "write") is None
    assert authority.comes_back(one.id, one.token, "write") is one and authority.holder == one.id
    one.connected = False
    assert authority.request(two, 30, now=1)


def test_a_ceiling_lowers_roles_now_and_later(authority: Authority) -> None:
    agent = join(authority, "agent", "admin", "bot")
    assert authority.set_ceiling("agent", "bot", "observe") == [agent]
    assert not agent.may("write") and join(authority, "agent", "write", "bot").role == "observe"
    assert join(authority, "human", "write", "bot").role == "write"
    authority.set_ceiling("agent", "bot", None)
    assert agent.role == "admin"
