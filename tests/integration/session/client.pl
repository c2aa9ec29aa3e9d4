#!/usr/bin/perl
# A client of the wire protocol that shares no code with criuctl: `client.pl SOCKET` types a line, prints what comes back
# until the session ends, and ends with its exit code.  PROTOCOL.md is all that one needs to write it.
use strict;
use warnings;
use IO::Socket::UNIX;
use JSON::PP;

my $socket = IO::Socket::UNIX->new(Peer => $ARGV[0]) or die "connect: $!";
my $buffer = '';

sub fill {
    my ($size) = @_;
    while (length($buffer) < $size) {
        sysread($socket, $buffer, 65536, length $buffer) or die "the holder closed the connection\n";
    }
    return substr($buffer, 0, $size, '');
}

sub put { my ($data) = @_; syswrite($socket, $data) == length $data or die "write: $!" }

sub request { my ($message) = @_; my $body = encode_json($message); put(pack('N C a*', length($body) + 1, ord 'J', $body)) }

put("criuctl-session 1 1 perl-example/1\n");
my $line = '';
$line .= fill(1) until $line =~ /\n$/;
$line =~ /^criuctl-session (\d+) (\d+) / && $1 <= 1 && 1 <= $2 or die "no common version: $line";

request({ id => 1, op => 'hello', kind => 'agent', name => 'perl', role => 'write' });
request({ id => 2, op => 'attach', from => 'start' });
put(pack('N C N a*', 1 + 4 + 17, ord 'I', 3, "spoken from perl\n"));
request({ id => 4, op => 'wait', for => 'exit' });

my ($code, $ended);
until ($ended && defined $code) {
    my ($length, $type) = unpack 'N C', fill(5);
    my $body = fill($length - 1);
    if ($type == ord 'O') {
        my ($offset, $bytes) = unpack 'Q> a*', $body;
        print $bytes;
    }
    elsif ($type == ord 'J') {
        my $message = decode_json($body);
        die "$message->{error}{message}\n" if $message->{error};
        $code = $message->{exit_code} if ($message->{id} // 0) == 4;
        $ended = 1 if ($message->{event} // '') eq 'exit';
    }
}
request({ id => 5, op => 'bye' });
exit($code);
