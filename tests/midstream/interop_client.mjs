// Interoperability cases with @grpc/grpc-js: `node interop_client.mjs PORT`. Prints one line per passed case.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import path from "node:path";

const require = createRequire(path.join(process.env.TEST_NODE_MODULES, "index.js"));
const grpc = require("@grpc/grpc-js");
const SERVICE = "midstream.test.Interop";
const encode = (message) => Buffer.from(JSON.stringify(message));
const decode = (data) => JSON.parse(data.toString());
const client = new grpc.Client(`127.0.0.1:${process.argv[2]}`, grpc.credentials.createInsecure());
const payload = (size) => ({ payload: "\0".repeat(size) });
const name = (method) => `/${SERVICE}/${method}`;

const unary = (method, request, metadata = new grpc.Metadata(), options = {}) =>
  new Promise((resolve, reject) => {
    const found = {};
    const call = client.makeUnaryRequest(name(method), encode, decode, request, metadata, options, (error, response) => {
      found.error = error;
      found.response = response;
    });
    call.on("metadata", (initial) => (found.initial = initial));
    call.on("status", (status) => resolve({ ...found, status }));
    setTimeout(() => reject(new Error(`${method} timed out`)), 20_000).unref();
  });

const all = (call) =>
  new Promise((resolve, reject) => {
    const messages = [];
    call.on("data", (message) => messages.push(message));
    call.on("error", () => {});
    call.on("status", (status) => resolve({ messages, status }));
    setTimeout(() => reject(new Error("a stream timed out")), 20_000).unref();
  });

const cases = {
  async large_unary() {
    const { response } = await unary("UnaryCall", { ...payload(271828), size: 314159 });
    assert.deepEqual([response.payload.length, response.received], [314159, 271828]);
  },
  async client_streaming() {
    const total = await new Promise((resolve, reject) => {
      const done = (error, response) => (error ? reject(error) : resolve(response.total));
      const call = client.makeClientStreamRequest(name("StreamingInputCall"), encode, decode, done);
      for (const size of [27182, 8, 1828, 45904]) call.write(payload(size));
      call.end();
    });
    assert.equal(total, 74922);
  },
  async server_streaming() {
    for (const method of ["StreamingOutputCall", "WrittenOutputCall"]) {
      const sizes = [31415, 9, 2653, 58979];
      const { messages, status } = await all(client.makeServerStreamRequest(name(method), encode, decode, { sizes }));
      assert.deepEqual(messages.map((message) => message.payload.length), sizes);
      assert.equal(status.code, grpc.status.OK);
    }
  },
  async ping_pong() {
    const call = client.makeBidiStreamRequest(name("FullDuplexCall"), encode, decode);
    const found = [];
    const asked = [31415, 9, 2653, 58979];
    call.on("data", (message) => {
      found.push(message.payload.length);
      if (found.length < asked.length) call.write({ ...payload(10), sizes: [asked[found.length]] });
      else call.end();
    });
    const ended = all(call);
    call.write({ ...payload(10), sizes: [asked[0]] });
    assert.equal((await ended).status.code, grpc.status.OK);
    assert.deepEqual(found, asked);
  },
  async custom_metadata() {
    const metadata = new grpc.Metadata();
    metadata.set("x-grpc-test-echo-initial", "test_initial_metadata_value");
    metadata.set("x-grpc-test-echo-trailing-bin", Buffer.from([0xab, 0xab, 0xab]));
    const { initial, status } = await unary("UnaryCall", { size: 1 }, metadata);
    assert.deepEqual(initial.get("x-grpc-test-echo-initial"), ["test_initial_metadata_value"]);
    assert.deepEqual(status.metadata.get("x-grpc-test-echo-trailing-bin"), [Buffer.from([0xab, 0xab, 0xab])]);
  },
  async status_code_and_message() {
    for (const message of ["test status message", "\t\nand Unicode BMP ☺ and non-BMP 😈\t\n"]) {
      const { status } = await unary("UnaryCall", { status: { code: 2, message } });
      assert.deepEqual([status.code, status.details], [2, message]);
    }
  },
  async unimplemented() {
    assert.equal((await unary("Missing", {})).status.code, grpc.status.UNIMPLEMENTED);
  },
  async cancel_after_first_response() {
    const call = client.makeBidiStreamRequest(name("FullDuplexCall"), encode, decode);
    call.on("data", () => call.cancel());
    const ended = all(call);
    call.write({ ...payload(10), sizes: [31415] });
    assert.equal((await ended).status.code, grpc.status.CANCELLED);
  },
  async timeout_on_sleeping_server() {
    const { status } = await unary("SleepingCall", {}, new grpc.Metadata(), { deadline: Date.now() + 200 });
    assert.equal(status.code, grpc.status.DEADLINE_EXCEEDED);
  },
  async many_calls() {
    const calls = Array.from({ length: 100 }, (_, index) => unary("UnaryCall", { size: 10_000 + index }));
    const sizes = (await Promise.all(calls)).map(({ response }) => response.payload.length);
    assert.deepEqual(sizes, Array.from({ length: 100 }, (_, index) => 10_000 + index));
  },
};

for (const [title, run] of Object.entries(cases)) {
  await run();
  console.log(title);
}
client.close();
