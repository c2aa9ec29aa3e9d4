"""Checkpoints: content-addressed chunks in sealed packs, and the manifests that name them.

`repository` is the way in; `writer` and `reader` move bytes; `manifest` says what a checkpoint is.
The format, byte for byte, is specified in ``images/FORMAT.md``.  Nothing is imported here:
encryption and compression libraries load when they are first needed.
"""
