"""The Model Context Protocol server of ``criuctl mcp``: agents work in sessions by tools.

- `server`: the server with its tools, resources and prompts, for either transport.
- `stdio`, `http`: the transports; a bearer token and the page's rules guard the second.
- `tools`, `resources`: what a client may ask for; `confirmations`: what is asked back.
- `service`: the state behind them: the clients, and threads for what blocks.
- `operations`: dumps and restores, which are criuctl commands of their own.
- `access`: the one module that talks to sessions.
- `patterns`: searching for a client's pattern, which may be hostile.
- `bounds`: what programs have printed, made harmless, cut to a length, and marked as data.

The top-level package ``mcp`` is the protocol's official SDK; this one is ``criuctl.mcp``.
"""
