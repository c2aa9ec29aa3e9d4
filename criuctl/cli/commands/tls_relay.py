"""``criuctl tls-relay``."""

from __future__ import annotations

import click

from ..app import App, pass_app
from ..pages import page
from ..streams import tell
from ..text import printable


@page(
    examples=[
        (
            "PostgreSQL, for the programs of the user app (`psql -h /run/tls`):",
            "criuctl tls-relay --listen /run/tls/.s.PGSQL.5432 --owner app --to db:5432",
        ),
        (
            "Redis, with an authority of your own:",
            "criuctl tls-relay --listen 127.0.0.1:6379 --to cache:6380 --ca /etc/ca.pem",
        ),
    ],
    exits=[4, 9, 13],
    see_also=["connections", "dump", "restore"],
)
@click.option(
    "--listen",
    required=True,
    metavar="PATH|HOST:PORT",
    help="Take plain connections here: a unix socket, which is made with mode 0600, or a port of "
    "loopback, which every user of this host reaches.  [default: none]",
)
@click.option(
    "--to",
    required=True,
    metavar="HOST:PORT",
    help="The server that speaks TLS.  [default: none]",
)
@click.option(
    "--protocol",
    type=click.Choice(["postgresql", "redis", "tls"]),
    help="How TLS begins: PostgreSQL is asked for it first; with redis, and tls for any other "
    "server, it begins with the first byte.  [default: by the port: 5432, 6379, 6380]",
)
@click.option(
    "--owner",
    metavar="USER",
    default="",
    help="The user whose programs may connect to the unix socket.  [default: the caller]",
)
@click.option(
    "--ca",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="Authorities that may sign the server's certificate.  [default: the system's]",
)
@click.option(
    "--server-name",
    metavar="NAME",
    default="",
    help="The name that the server's certificate must have.  [default: the host of --to]",
)
@click.option(
    "--cert",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="A client certificate; needs a unix socket.  [default: none]",
)
@click.option(
    "--key",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="Its private key.  [default: in the file of --cert]",
)
@click.option(
    "--no-verify",
    is_flag=True,
    help="Believe any certificate: an attacker on the way can read and change everything.",
)
@click.option(
    "--connections",
    type=click.IntRange(min=1, max=10000),
    default=200,
    show_default=True,
    metavar="N",
    help="At most N at the same time.",
)
@pass_app
def tls_relay(
    app: App,
    listen: str,
    to: str,
    protocol: str | None,
    owner: str,
    ca: str | None,
    server_name: str,
    cert: str | None,
    key: str | None,
    no_verify: bool,
    connections: int,
) -> int:
    """Speak TLS to a database server for programs that speak plain text to this relay, so that
    their connections can be set up again after a restore: the keys of a TLS connection are in the
    program, and nothing accepts them on another one. The program connects to the relay instead of
    the server, without TLS; the rule of the connection is the one for plain connections (see
    criuctl help connection-policies).

    The relay runs outside of the session, on each host on which the session may be restored, at the
    same place. It needs no rights of root beyond --owner. The server's certificate is verified,
    with its name. Passwords pass through the relay; channel binding (SCRAM-SHA-256-PLUS) is not
    possible. Files of certificates are read again for each connection.

    It runs in the foreground, for a service manager, until SIGTERM; its connections end with it. A
    connection that fails is reported on standard error, and to a PostgreSQL client.
    """
    from ...errors import UsageError
    from ...ops.relaying.listeners import Place, host_and_port, listening
    from ...ops.relaying.relay import Relay, serve
    from ...ops.relaying.tls import Server, Trust, protocol_of

    place = Place.parse(listen)
    host, port = host_and_port(to, "the server as HOST:PORT")
    if key is not None and cert is None:
        raise UsageError("--key is of no use without --cert")
    if cert is not None and not place.path:
        raise UsageError(
            "every user of this host reaches a port, and would use the client certificate",
            hint="Use --listen /run/tls/NAME, with --owner.",
        )
    chosen = protocol or protocol_of(port)
    server = Server(host, port, chosen, server_name)  # type: ignore[arg-type]  # click checked it
    trust = Trust(ca, cert, key, not no_verify)
    trust.context()  # what is wrong with the files is reported now
    if no_verify:
        tell("criuctl: warning: certificates are not verified")

    def opened() -> None:
        body = {"listen": str(where), "to": str(server), "protocol": server.protocol}
        app.emit(body, lambda: f"{where} -> {server} ({server.protocol}, TLS)", lambda: "")
        if not app.json and not app.quiet:
            tell("^C ends it")

    def failed(text: str) -> None:
        tell(f"criuctl: warning: {printable(text)}")

    with listening(place, owner) as sock:
        bound = sock.getsockname()
        where = place if place.path else Place(host=bound[0], port=bound[1])
        serve(Relay(server, trust, failed, connections=connections).run(sock, opened))
    return 0
