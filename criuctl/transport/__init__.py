"""How two criuctl processes on two hosts communicate: a link of frames, over the system's ssh."""
