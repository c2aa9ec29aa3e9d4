"""``criuctl share NAME``, ``share list|revoke``."""

from __future__ import annotations

from typing import Any

import click

from ...quoting import quoted
from ..app import App, pass_app
from ..extras import need
from ..pages import Entry, LazyGroup, page
from ..sessions import name_argument
from ..streams import tell
from ..tables import Column
from ..text import printable

_SELF = "criuctl.cli.commands.share"
_COLUMNS = (
    Column("ID"),
    Column("SESSION"),
    Column("ROLE", rank=2),
    Column("STATE"),
    Column("GUEST"),
    Column("ADDRESS", rank=3),
    Column("EXPIRES", rank=1),
    Column("", prose=True, rank=4),
)


share = LazyGroup(
    "share",
    default="open",
    entries={
        "open": Entry(f"{_SELF}:open_", "Share a session; `share NAME` is the same."),
        "list": Entry(f"{_SELF}:list_", "List the shares of this host."),
        "revoke": Entry(f"{_SELF}:revoke", "End shares, and cut their guests off."),
    },
    summary="Share a session with a guest, by way of a relay.",
    help="""\
    A relay is any host that you can log in to by ssh and that a guest can reach. A share keeps a
    reverse tunnel to it, at one address, from this host, behind whatever firewall. Through it a
    guest attaches with the one line that this command prints. Inside the tunnel guest and host
    speak a second ssh, with keys made for this share: the relay sees ciphertext, and can neither
    read, change nor type anything. `criuctl share NAME` is `criuctl share open NAME`.""",
    examples=[
        (
            "Let a colleague look, for two hours:",
            "criuctl share work --via ssh://me@relay.example.com",
        ),
        ("What is shared?", "criuctl share list"),
        ("End it:", "criuctl share revoke 4f1c22ab"),
    ],
    exits=[3, 7, 9, 12],
    see_also=["attach", "ui", "role", "log"],
)


@page(
    examples=[
        ("To look, for two hours:", "criuctl share work --via ssh://me@relay.example.com"),
        (
            "To type, for half an hour:",
            "criuctl share work --via ssh://me@relay --role write --for 30min",
        ),
        ("The guest's end:", "criuctl attach 'share://relay.example.com:40127/4f1c22ab#...'"),
        (
            "Where the relay's port is not open to others, with a login of the guest's own:",
            "criuctl attach --via ssh://them@relay.example.com 'share://...'",
        ),
        ("In the guest's browser:", "criuctl ui --host 'share://...'"),
    ],
    exits=[3, 7, 9, 12],
    see_also=["share list", "share revoke", "attach", "log"],
)
@name_argument
@click.option(
    "--via",
    required=True,
    metavar="HOST",
    help="The relay: ssh://[USER@]HOST[:PORT], or a name under hosts in the configuration. ssh "
    "must log in there without asking.  [default: none; it is required]",
)
@click.option(
    "--role",
    type=click.Choice(["observe", "write"]),
    default="observe",
    show_default=True,
    help="What the guest may do: look, or type as well.",
)
@click.option(
    "--for",
    "span",
    metavar="TIME",
    default="2h",
    show_default=True,
    help="End the share after this time: 30min, 2h, 7d at most.",
)
@click.option(
    "--address",
    metavar="HOST",
    default="",
    help="The relay's name or address as guests reach it.  [default: the one in --via]",
)
@pass_app
def open_(app: App, name: str, via: str, role: str, span: str, address: str) -> int:
    """Share a session with one guest, and print the line by which it attaches. Share again for
    another guest.

    The line has the relay's address, the key by which the guest's program recognises this host, and
    a one-time key. Give it to the guest by a way that no one else reads: the first to use it is the
    guest. It can be used once. The program that has used it makes a key of its own, by which it
    comes back after a lost connection; another program, with a copy, is refused.

    The tunnel is kept by a process in the background, with your rights, which survives this
    terminal. When the connection to the relay is lost, it is made again within seconds, at the same
    port. Keys of an ssh agent are used as long as the agent is there. The relay's sshd decides who
    reaches the port: with GatewayPorts no, its default, only the relay itself does, and the guest
    needs a login there (attach --via); with clientspecified or yes, everyone who can connect to
    the relay.

    A guest sees this session's terminal and status, and with the role write types and resizes as a
    colleague at an attached terminal would; it takes nothing from another writer, and gets no
    command, file, forwarding or other session. What it does is in the session's log under the name
    share-ID. A guest who types in a root shell can do everything that root can.

    The share ends, and its guest is cut off, when its time is over, by criuctl share revoke, and
    when the session ends or moves to another host; criuctl share list says which. It goes on when
    the session is restored on this host.
    """
    need("share", "asyncssh")
    from ...host.retention import seconds
    from ...share.start import start

    with app.reporting():
        made = start(
            app.config,
            name,
            via,
            role=role,
            seconds=seconds(span),
            address=address,
            config_file=app.config_file,
        )
    body = made.share.to_dict() | {"invitation": made.line, "reachable": made.reachable}
    app.emit(body, lambda: f"criuctl attach {quoted(made.line)}", brief=lambda: made.line)
    if not app.json and not app.quiet:
        tell(
            f"{role} until {body['expires']}, for one guest, once; `criuctl share revoke "
            f"{quoted(made.share.id)}` ends it"
        )
        if not made.reachable:
            tell(
                f"criuctl: warning: {body['address']} does not lead here from this host: the relay "
                "may keep the port to itself (GatewayPorts in its sshd_config)\nhint: The guest "
                f"logs in there: `criuctl attach --via {quoted(via)} {quoted(made.line)}`."
            )
    return 0


@page(
    examples=[("What is shared, and who is there:", "criuctl share list")],
    see_also=["share", "share revoke"],
)
@pass_app
def list_(app: App) -> int:
    """List the shares of this host. STATE is up, or connecting while the relay cannot be reached;
    GUEST is none, here, or away for one that has been here. One that has ended stays in the list
    for a day, with the reason.
    """
    from ...share.records import all_shares

    found = [one.to_dict() for one in all_shares(app.config)]
    app.emit_table(found, _COLUMNS, [_row(one) for one in found], empty="nothing is shared")
    return 0


def _row(one: dict[str, Any]) -> list[str]:
    about = one["why"] or one["trouble"]
    return [
        one["id"],
        printable(one["session"]),
        one["role"],
        one["state"],
        one["guest"],
        printable(one["address"]),
        one["expires"],
        printable(about),
    ]


@page(
    examples=[("End a share:", "criuctl share revoke 4f1c22ab")],
    exits=[3],
    see_also=["share", "share list"],
)
@click.argument("ids", nargs=-1, required=True, help="Ids of shares.")
@pass_app
def revoke(app: App, ids: tuple[str, ...]) -> int:
    """End shares now. A guest that is connected is cut off at once, and the relay's port is closed.
    A share that has ended already stays as it is.
    """
    from ...share.records import revoke as end

    ended = [end(app.config, one).to_dict() for one in ids]
    app.emit(
        ended,
        lambda: "\n".join(f"{one['id']}: {printable(one['why'])}" for one in ended),
        brief=lambda: "",
    )
    return 0
