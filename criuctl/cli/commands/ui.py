"""``criuctl ui``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from ...errors import UsageError
from ..app import App, pass_app
from ..extras import need
from ..invitations import invitation
from ..pages import page
from ..streams import tell, write_result

if TYPE_CHECKING:
    from ...web.server import Opened


@page(
    examples=[
        (
            "The page for this machine's browser; the address that is printed holds the token:",
            "criuctl ui",
        ),
        (
            "From your desk or phone, through ssh (then open the printed address there):",
            "ssh -L 8765:127.0.0.1:8765 root@gamma criuctl ui",
        ),
        (
            "With the sessions of two more hosts:",
            "criuctl ui --host ssh://root@gamma --host ssh://root@delta:2222",
        ),
        ("A session that someone shares with you:", "criuctl ui --host 'share://...'"),
        ("For a screen on the wall, without changing anything:", "criuctl ui --read-only --open"),
    ],
    exits=[9, 13],
    see_also=["ls", "attach", "list", "show"],
)
@click.option(
    "--listen",
    metavar="ADDRESS:PORT",
    default="127.0.0.1:8765",
    show_default=True,
    help="Listen here; port 0 is any that is free.",
)
@click.option(
    "--remote",
    is_flag=True,
    help="Allow --listen an address that other machines reach. There is no TLS: others on the "
    "network path can read the token and all that terminals show. Better is `ssh -L`, or a proxy "
    "with TLS.  [default: loopback only]",
)
@click.option(
    "--name",
    "names",
    multiple=True,
    metavar="NAME",
    help="A name, of a proxy say, under which browsers reach the page; may be repeated.  "
    "[default: localhost, this host's name, and any address]",
)
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="HOST",
    help="Show the sessions of this host, too: ssh://[USER@]HOST[:PORT], a name under hosts in "
    "the configuration, or an invitation of criuctl share; may be repeated.  [default: this host "
    "only]",
)
@click.option(
    "--read-only",
    is_flag=True,
    help="Show everything and change nothing: no typing, no actions.",
)
@click.option("--open", "open_", is_flag=True, help="Open the page in the browser of this desktop.")
@pass_app
def ui(
    app: App,
    listen: str,
    remote: bool,
    names: tuple[str, ...],
    hosts: tuple[str, ...],
    read_only: bool,
    open_: bool,
) -> int:
    """Serve a page for the browser: the sessions of this host, live; of each its processes,
    connections, checkpoints with charts of their size and of how long the tree stood still, and its
    terminal, in which one can type. It is usable on a phone.

    Prints the address, which holds a token that is new each time; without the token the server
    reveals nothing. With it, a person can do what you can do with the sessions of this host, unless
    --read-only. In the terminal the rules of criuctl attach apply: one client at a time writes,
    watching does not disturb the others, and Take over is --take.

    Share, in the page of a session, makes a link for someone else: to that session's terminal and
    processes and nothing else, to look or to type, for an hour to seven days. A link can be revoked
    there, and ends with the server. Its bearer has to reach the server, as you do.

    With --host, the list has the sessions of other hosts as well, and their terminals, over ssh as
    the user that runs the server; ssh must log in without asking. A host that cannot be reached is
    shown with the reason. Everything else about such a session is done by ssh HOST criuctl.
    With an invitation, the list has the session that it is for. The page comes from this server, on
    your machine, and the relay sees ciphertext only. The server uses the invitation up; share:
    asks for the line, which others could otherwise read in the arguments.

    Actions of the page (run, pause, resume, snapshot, fork, dump, kill, forget, restore) are run by
    a separate criuctl; when the server is stopped meanwhile, that one is interrupted and cleans up
    first. ^C ends the server, with 0.
    """
    need("ui", "aiohttp")
    from ...web.hosts import parse_hosts
    from ...web.rules import Address
    from ...web.server import serve

    address = Address.parse(listen)
    shares = [invitation(text) for text in hosts if text.startswith("share:")]
    others = parse_hosts([text for text in hosts if not text.startswith("share:")], app.config)
    if not address.loopback:
        if not remote:
            raise UsageError(
                f"{address.host} is reached from other machines, and this page has no TLS",
                hint=(
                    f"From another machine: ssh -L {address.port}:127.0.0.1:{address.port}; or "
                    "say --remote if you mean it."
                ),
            )
        tell(
            "criuctl: warning: no TLS: others on the network path can read the token and what "
            "terminals show"
        )
    with app.reporting() as reporter, contextlib.ExitStack() as stack:

        def opened(server: Opened) -> None:
            body = {
                "url": server.url,
                "address": server.address.host,
                "port": server.address.port,
                "read_only": server.read_only,
                "limits": list(server.limits),
            }
            for text in server.limits:
                tell(f"criuctl: warning: {text}")
            if app.json:
                app.emit(body, lambda: "")
            else:
                write_result(server.url)
                if not app.quiet:
                    tell("^C ends it")
            if open_:
                stack.enter_context(_shown_in_browser(server.url))

        serve(
            app.config,
            address,
            program=app.own_program(),
            reporter=reporter,
            read_only=read_only,
            names=names,
            hosts=others,
            shares=shares,
            opened=opened,
        )
    return 0


@contextlib.contextmanager
def _shown_in_browser(url: str) -> Iterator[None]:
    """Open `url` in the desktop's browser, through a file that only this user can read: other users
    could read an argument list.
    """
    import html
    import tempfile
    import threading
    import webbrowser

    # mode 0600
    with tempfile.NamedTemporaryFile("w", prefix="criuctl-ui-", suffix=".html") as file:
        file.write(
            '<!doctype html><meta http-equiv="refresh" content="0; '
            f'url={html.escape(url)}"><title>criuctl</title>\n'
        )
        file.flush()
        # In a thread: the call returns only when a browser in the terminal is left.
        threading.Thread(target=webbrowser.open, args=(f"file://{file.name}",), daemon=True).start()
        yield
