"""Several hosts on one machine, for tests: what one Linux host has of its own, made of namespaces.

A host is a set of network, mount, PID, UTS, IPC and control group namespaces with another hostname,
machine id, boot id, root file system (an overlay of this machine's whose changes are in memory),
``/tmp``, ``/run``, ``/root``, terminals, and an sshd.  Hosts meet on a bridge in one more network
namespace, where a test cuts it, slows it down and loses packets.

- `kernel`     the system calls that Python 3.11 lacks
- `supervisor` the program that makes hosts and the bridge, and takes everything away when the tests
  are gone, however they went
- `init`       PID 1 of a host: builds the root, starts what it is asked to start, reaps
- `root`       the file system of a host
- `sshd`       keys and configuration
- `bridge`     the wire between the hosts, on the side of the tests; `delay` is the part of it that
  takes time
- `host`       one host, on the side of the tests
- `observer`   who looks at the hosts from outside, and at a program that must run on one of them
  only
- `pauses`     criuctl held at a step of its work, on any host
- `relay`      a server of this machine on the address of a host

``support.hosts`` has the fixture.
"""
