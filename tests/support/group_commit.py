"""A model of a group checkpoint across hosts: what `criuctl help linked-sessions` designs under
"Across hosts", with everything that may go wrong, and no real host.

Members (one on each host) freeze, vote, and wait for the decision; the coordinator decides when all
have voted. The decision is one object in the store, made by a put that never overwrites: the
coordinator puts ``commit``; a member that has waited too long puts ``abort``; whichever is there
first holds for all. Messages are lost or late, the coordinator and hosts stop for good at any step,
and the store cannot be reached from a host for a while.

`run` plays one random course of events and returns the `World` at its end; `faults` names what a
group checkpoint must never show. A `naive` member gives up by itself instead of asking the store:
the usual two-phase commit with a time-out, which the model must find wrong.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

STEPS = 400
PATIENCE = 30  # steps for which a member waits before it asks the store


class Unreachable(Exception):
    """The store does not answer this host now."""


@dataclass
class Store:
    """What all hosts share; every operation is atomic, as a conditional put of S3 is."""

    decision: str = ""
    manifests: set[int] = field(default_factory=set)
    cut: dict[int, int] = field(default_factory=dict)  # host -> until which step it is cut off

    def decide(self, host: int, word: str, now: int) -> str:
        """Put a decision unless there is one; return the one that holds."""
        if self.cut.get(host, 0) > now:
            raise Unreachable
        self.decision = self.decision or word
        return self.decision


@dataclass
class Member:
    """One session and the criuctl on its host.

    running -> frozen -> voted (its checkpoint is durable) -> committed | aborted; a host that stops
    is lost with its session.
    """

    number: int
    state: str = "running"
    since: int = 0
    asked: bool = False  # it has the coordinator's request


@dataclass
class World:
    """The hosts, the store, and the messages under way."""

    chance: random.Random
    members: list[Member]
    store: Store = field(default_factory=Store)
    coordinator: bool = True  # it lives
    votes: set[int] = field(default_factory=set)
    messages: list[tuple[int, str, int]] = field(default_factory=list)  # due, word, member
    now: int = 0
    naive: bool = False

    def send(self, word: str, member: int) -> None:
        """Send a message; it may be lost, or overtake others."""
        if self.chance.random() > 0.1:
            self.messages.append((self.now + self.chance.randint(1, 20), word, member))

    def deliver(self) -> None:
        due = [message for message in self.messages if message[0] <= self.now]
        self.messages = [message for message in self.messages if message[0] > self.now]
        for _, word, number in due:
            member = self.members[number]
            if word == "voted":
                if self.coordinator:
                    self.votes.add(number)
            elif member.state == "lost":
                continue
            elif word == "freeze":
                member.asked = True
            elif member.state == "voted" and word in ("commit", "abort"):
                self.settle(member, word)

    def settle(self, member: Member, word: str) -> None:
        member.state = "committed" if word == "commit" else "aborted"

    def act(self, member: Member) -> None:
        """Let a member do its next step."""
        if member.state == "running" and member.asked:
            member.state, member.since = "frozen", self.now
        elif member.state == "frozen":
            if self.chance.random() < 0.02:  # its dump fails: it has not voted, and needs no one
                member.state = "aborted"
            elif self.chance.random() < 0.3 and self.store.cut.get(member.number, 0) <= self.now:
                self.store.manifests.add(member.number)
                member.state, member.since = "voted", self.now
                self.send("voted", member.number)
        elif member.state == "voted" and self.now - member.since > PATIENCE:
            if self.naive:
                self.settle(member, "abort")
                return
            try:
                self.settle(member, self.store.decide(member.number, "abort", self.now))
            except Unreachable:
                return  # it stays as it is: the cost of this protocol

    def coordinate(self) -> None:
        """Ask, and decide when all have voted."""
        for member in self.members:
            if self.now % 7 == 0 and member.number not in self.votes:
                self.send("freeze", member.number)
        if len(self.votes) == len(self.members):
            try:
                word = self.store.decide(-1, "commit", self.now)
            except Unreachable:
                return
            for member in self.members:
                self.send(word, member.number)

    def harm(self) -> None:
        """Let something go wrong."""
        what = self.chance.random()
        if what < 0.01:
            self.coordinator = False
        elif what < 0.014:
            self.chance.choice(self.members).state = "lost"
        elif what < 0.03:
            host = self.chance.randint(-1, len(self.members) - 1)
            self.store.cut[host] = self.now + self.chance.randint(1, 60)


def run(seed: int, *, naive: bool = False, harmless: bool = False) -> World:
    """Play one course of events."""
    chance = random.Random(seed)
    world = World(chance, [Member(n) for n in range(chance.randint(2, 4))], naive=naive)
    for world.now in range(STEPS):
        if not harmless and world.now < STEPS // 2:
            world.harm()  # in the second half all that lives can be reached
        world.deliver()
        if world.coordinator:
            world.coordinate()
        for member in world.members:
            if member.state != "lost" and chance.random() < 0.8:
                world.act(member)
    return world


def faults(world: World) -> list[str]:
    """What must never be so."""
    states = {member.state for member in world.members} - {"lost"}
    found = []
    if {"committed", "aborted"} <= states:
        found.append("one member was ended with the group and another one runs on")
    listed = world.store.decision == "commit"
    if listed and world.store.manifests != {member.number for member in world.members}:
        found.append("a group checkpoint is listed that lacks a member")
    if "committed" in states and not listed:
        found.append("a member was ended, and the group checkpoint is not listed")
    if "voted" in states:
        found.append("a member waits although the store can be reached")
    return found
