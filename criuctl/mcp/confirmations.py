"""What is asked back before something is ended, or taken from another operator.

A client that can ask its user (elicitation) is asked.  For any other the call fails, names what
would be ended, and says with which `confirm` argument it is repeated: the id of the session, so it
is good for this one life of the session only; or the id of the operator that writes.

The questions are resolvers: the SDK runs them before the tool, again when the answer is there, and
takes an answer for the very same question only.
"""

from __future__ import annotations

from typing import Annotated

from mcp.server.mcpserver import AcceptedElicitation, Elicit, ElicitationResult, Resolve
from pydantic import BaseModel, Field

from ..errors import Vetoed
from .service import Asked, as_tool_error, known, service_of


class Consent(BaseModel):
    """The user's answer."""

    yes: bool = Field(default=False, description="Do it")


class Ending(BaseModel):
    """What a kill would end: the session's id, empty for one command of it; a text."""

    identity: str
    text: str = ""


class NotConfirmed(Vetoed):
    """This needs a confirmation: it ends, or takes away, what from_session names."""

    code = "not-confirmed"


async def what_ends(asked: Asked, name: str, command_id: str | None) -> Ending:
    """Look up what a kill would end."""
    if command_id is not None:
        return Ending(identity="")
    service = service_of(asked)
    await known(service.off(asked, service.access.need, name, "kill"))
    text, identity = await known(service.off(asked, service.access.what_ends, name))
    return Ending(identity=identity, text=text)


async def may_kill(
    asked: Asked,
    name: str,
    confirm: str | None,
    ending: Annotated[Ending, Resolve(what_ends)],
) -> Consent | Elicit[Consent]:
    """Ask whether a session may be ended."""
    if not ending.identity or confirm == ending.identity:
        return Consent(yes=True)
    if _can_ask(asked):
        text = f"End every process of {ending.text}? What is in no checkpoint is lost."
        return Elicit(f"{text} [{ending.identity}]", Consent)
    service = service_of(asked)
    much = await known(service.off(asked, service.access.how_much_ends, name))
    raise as_tool_error(
        NotConfirmed(
            "ending a session needs a confirmation",
            ends=f"{ending.text}: {much}",
            hint=f"If that is meant, call kill again with confirm={ending.identity!r}.",
        )
    )


async def may_take(
    asked: Asked, name: str, take: bool, confirm: str | None
) -> Consent | Elicit[Consent]:
    """Ask whether the write lease may be taken from another operator that has it."""
    if not take:
        return Consent(yes=True)
    service = service_of(asked)
    await known(service.off(asked, service.access.need, name, "lease take"))
    other = await known(service.off(asked, service.access.writes, name))
    if other is None or confirm == other[1]:
        return Consent(yes=True)
    text = f"{other[0]} is writing into session {name!r}"
    if _can_ask(asked):
        return Elicit(f"{text}. Take the write lease from it? [{other[1]}]", Consent)
    raise as_tool_error(
        NotConfirmed(
            "taking the write lease needs a confirmation",
            takes_from=text,
            hint=f"If that is meant, make the call again with confirm={other[1]!r}.",
        )
    )


def check(answer: ElicitationResult[Consent], what: str) -> None:
    """Raise unless the answer is a consent."""
    if not (isinstance(answer, AcceptedElicitation) and answer.data.yes):
        raise as_tool_error(NotConfirmed(f"{what} was declined; nothing was touched"))


def _can_ask(asked: Asked) -> bool:
    """Whether the client can ask its user by a form."""
    able = asked.client_capabilities
    asking = able.elicitation if able is not None else None
    return asking is not None and (asking.form is not None or asking.url is None)
