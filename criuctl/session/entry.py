"""The program of a holder, run by path as ``python -I -S entry.py ...``: without site packages, to start fast and stay small."""

import os
import sys

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    from criuctl.session.holder.holder import main

    main()
