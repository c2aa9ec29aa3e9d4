"""The program of a share's keeper, run by path."""

import os
import sys

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    from criuctl.share.keeper import main

    main()
