#!/bin/sh
# The fetch of Node.js 20 takes a response that was cut for a complete one, if the server announced `Connection: close`.
#
# Guess before the run: a chunked body without its last chunk is an error, whatever the other headers say (RFC 9112,
# section 8), as with curl.
# Seen with undici 6.24.1, which is in Node.js 20.20.2: no error; the text so far is the result. undici 6.29.1 reports the
# error. Without `Connection: close`, both do.
#
# Needs node and npm. Fails if this changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm install --silent --no-fund --no-audit old@npm:undici@6.24.1 new@npm:undici@6.29.1
cat > cut.mjs <<'END'
import net from "node:net";

// One version per process, since all use the same global dispatcher.
const [name, version] = process.argv.slice(2);
const { fetch } = await import(name);

// Sends one chunk of a chunked body and closes the connection without the last chunk.
async function cut(header) {
  const server = net.createServer((socket) => {
    socket.on("error", () => {});
    socket.once("data", () => {
      socket.write(`HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n${header}\r\n5\r\nhello\r\n`);
      setTimeout(() => socket.end(), 200);
    });
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  try {
    return await (await fetch(`http://127.0.0.1:${server.address().port}`)).text();
  } catch (error) {
    return `error: ${error.message}`;
  } finally {
    server.close();
  }
}
for (const header of ["", "connection: close\r\n"])
  console.log(`undici ${version}, ${header.trim() || "no header"}: ${await cut(header)}`);
END
{ node cut.mjs old 6.24.1; node cut.mjs new 6.29.1; } > seen
cat seen
diff seen - <<'END'
undici 6.24.1, no header: error: terminated
undici 6.24.1, connection: close: hello
undici 6.29.1, no header: error: terminated
undici 6.29.1, connection: close: error: terminated
END
