"""The program of a holder, run by path as ``python -I -S entry.py ...``.

Without site packages it starts fast and stays small.  The path is part of the protocol: a holder of
an older version that is asked for `reexec` runs ``criuctl/session/entry.py`` of the new version.
"""

import os
import sys

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    from criuctl.session.launch.program import main

    main()
