"""Say something on a broker line as another user: UID, socket, packet in hex; prints the reply."""

import os
import socket
import sys

uid, path, packet = int(sys.argv[1]), sys.argv[2], bytes.fromhex(sys.argv[3])
os.setgroups([])
os.setgid(uid)
os.setuid(uid)
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
    line.settimeout(20)
    line.connect(path)
    line.send(packet)
    sys.stdout.write(line.recv(65536).hex())
