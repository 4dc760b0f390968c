// Read one gRPC stream with npm `@grpc/grpc-js`.
import grpc from "@grpc/grpc-js";

const asked = JSON.parse(process.argv[2]);
const client = new grpc.Client(asked.url.replace("http://", ""), grpc.credentials.createInsecure());
const same = (data) => data;
let text = "", error = "";
const call = client.makeServerStreamRequest(asked.method, same, same, Buffer.alloc(0));
call.on("data", (data) => (text += data.toString()));
call.on("error", (raised) => (error = `${grpc.status[raised.code]}: ${raised.details}`));
call.on("close", () => report());
call.on("status", () => report());
let isReported = false;
function report() {
  if (isReported) return;
  isReported = true;
  setTimeout(() => { console.log("RESULT " + JSON.stringify({ text, error })); process.exit(0); }, 10);
}
