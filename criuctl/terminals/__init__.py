"""Terminals of a tree: what a dump keeps of them, and how a restore makes and fills them again."""
