"""The terminals of the Agent Client Protocol as sessions, for ``criuctl acp``.

An editor starts its agent through ``criuctl acp -- AGENT``, which passes all messages on (`relay`),
except those about terminals: these are sessions (`terminals`), which outlive agent and editor.
"""
