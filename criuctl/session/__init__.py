"""Sessions: a holder per session, its wire protocol and its clients.  Nothing is imported here, to start fast."""
