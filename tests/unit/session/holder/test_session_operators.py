"""Who writes: one at a time, by request, grant, take and yield; the time is passed in."""

from __future__ import annotations

import pytest

from criuctl.session.holder.operators import Authority, Operator, Refused
from criuctl.session.protocol import ANY, RESTORES


@pytest.fixture
def authority() -> Authority:
    return Authority()


def join(
    authority: Authority, kind: str = "human", role: str = "write", name: str = "", uid: int = 0
) -> Operator:
    name = name or f"{kind}{authority.serial}"
    return authority.join(kind, name, role, pid=1, since=0.0, uid=uid)


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


def test_a_held_lease_belongs_to_user_kind_and_name(authority: Authority) -> None:
    one = join(authority, name="ann")
    authority.request(one, 30, now=0)
    authority.hold(one, 600, now=0)
    one.connected = False
    later = join(authority, name="ann")
    assert authority.request(later, 30, now=599, soft=True) and authority.holder == later.id
    authority.touch(later, now=599)  # no message prolongs it
    for other in (join(authority, name="bob"), join(authority, "agent", name="ann")):
        with pytest.raises(Refused, match="keeps the lease for 1 s"):
            authority.request(other, 30, now=599)
    with pytest.raises(Refused):  # the name and the kind, but another user
        authority.request(join(authority, name="ann", uid=1000), 30, now=599)
    assert authority.expired(now=600) is later and not authority.held
    assert authority.request(join(authority, name="bob"), 30, now=600)


def test_two_of_one_identity_do_not_mix_their_words(authority: Authority) -> None:
    one, two = join(authority, name="ann"), join(authority, name="ann")
    authority.hold(one, 600, now=0)
    authority.wrote = 10.0
    with pytest.raises(Refused):
        authority.request(two, 30, now=10.5)
    with pytest.raises(Refused):
        authority.request(two, 30, now=20, polite=True)  # it only attaches
    assert authority.request(two, 30, now=11)
    assert authority.held and authority.expires == 600


def test_a_held_lease_ends_as_any_other(authority: Authority) -> None:
    bot, ann = join(authority, "agent", name="bot"), join(authority, name="ann")
    authority.hold(bot, 600, now=0)
    bot.connected = False
    with pytest.raises(Refused, match="only an admin"):
        authority.take(join(authority, "agent"), 30, now=1)
    assert authority.take(ann, 30, now=1) is bot and not authority.held
    authority.hold(ann, 600, now=1)
    ann.connected = False
    with pytest.raises(Refused, match="only an admin"):  # not a human from a human
        authority.take(join(authority), 30, now=2)
    again = join(authority, name="ann")
    assert authority.take(again, 30, now=2) is ann and authority.expires == 601
    assert authority.release(again) and not authority.held and not authority.holder


def test_a_held_lease_survives_a_re_exec(authority: Authority) -> None:
    one = join(authority, name="ann", uid=7)
    authority.hold(one, 600, now=0)
    after = Authority()
    after.restore(authority.to_state())
    assert after.held and after.operators[after.holder].identity == (7, "human", "ann")


def test_a_ceiling_for_all_of_a_kind_leaves_criuctl_s_own_services_alone(
    authority: Authority,
) -> None:
    bot = join(authority, "agent", "admin", "bot")
    authority.set_ceiling("agent", "bot", "admin")
    assert authority.set_ceiling("agent", ANY, "observe") == [bot]  # single ones are replaced
    authority.set_ceiling("service", ANY, "observe")
    assert join(authority, "service", "admin", "cron").role == "observe"
    assert join(authority, "service", "admin", RESTORES).role == "admin"
    assert join(authority, "human", "admin").role == "admin"
    assert authority.set_ceiling("agent", "bot", "write") == [bot] and bot.role == "write"
    assert join(authority, "agent", "write", "other").role == "observe"
    authority.set_ceiling("agent", ANY, None)
    assert bot.role == "admin"
