/* Preloaded into CRIU in the user namespace of `identity`: the kernel allows a socket buffer beyond
   the limit (SO_SNDBUFFORCE) to root of the first user namespace only.  The usual size will do. */
#define _GNU_SOURCE
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

int setsockopt(int fd, int level, int name, const void *value, socklen_t length) {
    if (level == SOL_SOCKET && name == SO_SNDBUFFORCE) name = SO_SNDBUF;
    if (level == SOL_SOCKET && name == SO_RCVBUFFORCE) name = SO_RCVBUF;
    return syscall(SYS_setsockopt, fd, level, name, value, length);
}
