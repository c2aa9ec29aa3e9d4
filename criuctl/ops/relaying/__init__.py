"""The relay behind ``criuctl tls-relay``: plain on this host, TLS to a database server."""
