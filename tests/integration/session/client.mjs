// A client of the wire protocol in JavaScript that shares no code with criuctl and needs no
// package:
//   node client.mjs SOCKET TEXT
// It attaches, types TEXT when the session has printed "ready", prints all output as it comes,
// reports the events on standard error, and ends with the session's exit code.

import net from "node:net";

const PREFACE = "criuctl-session 1 1 node-example/1\n";
const [path, text] = process.argv.slice(2);

class Client {
    #socket;
    #buffer = Buffer.alloc(0);
    #greeted = false; // the holder's preface has come
    #last = 0;
    #waiting = new Map(); // request id -> [resolve, reject]

    constructor(path, onOutput, onEvent) {
        this.onOutput = onOutput;
        this.onEvent = onEvent;
        this.#socket = net.connect(path);
        this.#socket.on("data", (data) => this.#take(data));
        this.#socket.on("error", (error) => this.#lost(error));
        this.#socket.on("close", () => this.#lost(new Error("the holder closed the connection")));
        this.#socket.write(PREFACE);
    }

    // Send a request; the promise has its answer, or is rejected with the holder's error.
    request(op, values = {}) {
        const id = ++this.#last;
        this.#frame("J", Buffer.from(JSON.stringify({ id, op, ...values })));
        return this.#answer(id);
    }

    // Type bytes, and wait until the terminal has taken them.
    type(bytes) {
        const id = ++this.#last;
        const head = Buffer.alloc(4);
        head.writeUInt32BE(id);
        this.#frame("I", Buffer.concat([head, Buffer.from(bytes)]));
        return this.#answer(id);
    }

    close() {
        this.#socket.end();
    }

    #answer(id) {
        return new Promise((resolve, reject) => this.#waiting.set(id, [resolve, reject]));
    }

    #frame(type, payload) {
        const head = Buffer.alloc(5);
        head.writeUInt32BE(payload.length + 1);
        head.write(type, 4, "latin1");
        this.#socket.write(Buffer.concat([head, payload]));
    }

    #take(data) {
        this.#buffer = Buffer.concat([this.#buffer, data]);
        if (!this.#greeted) {
            const end = this.#buffer.indexOf("\n");
            if (end < 0) return;
            const [name, min, max] = this.#buffer.toString("latin1", 0, end).split(" ");
            if (name !== "criuctl-session" || min > 1 || max < 1) {
                this.#socket.destroy(new Error("no common version"));
                return;
            }
            this.#buffer = this.#buffer.subarray(end + 1);
            this.#greeted = true;
        }
        while (this.#buffer.length >= 5) {
            const length = this.#buffer.readUInt32BE();
            if (this.#buffer.length < 4 + length) return;
            const type = this.#buffer.toString("latin1", 4, 5);
            const body = this.#buffer.subarray(5, 4 + length);
            this.#buffer = this.#buffer.subarray(4 + length);
            if (type === "O") this.onOutput(body.readBigUInt64BE(), body.subarray(8));
            if (type === "J") this.#message(JSON.parse(body.toString()));
        }
    }

    #message(message) {
        if ("event" in message) return this.onEvent(message);
        const [resolve, reject] = this.#waiting.get(message.id) ?? [() => {}, () => {}];
        this.#waiting.delete(message.id);
        if (message.error) reject(new Error(`${message.error.code}: ${message.error.message}`));
        else resolve(message);
    }

    #lost(error) {
        for (const [, reject] of this.#waiting.values()) reject(error);
        this.#waiting.clear();
    }
}

let printed = "";
let ready, ended;
const isReady = new Promise((resolve) => (ready = resolve));
const hasEnded = new Promise((resolve) => (ended = resolve));
const client = new Client(
    path,
    (_offset, bytes) => {
        process.stdout.write(bytes);
        printed += bytes.toString();
        if (printed.includes("ready")) ready();
    },
    (event) => {
        process.stderr.write(`${event.event}\n`);
        if (event.event === "exit") ended();
    },
);
await client.request("hello", { kind: "agent", name: "node", role: "write" });
await client.request("attach", { from: "start" });
const exit = client.request("wait", { for: "exit" });
await isReady;
const { offset } = await client.type(text);
process.stderr.write(`typed at ${offset}\n`);
const { exit_code } = await exit;
await hasEnded; // the log holds every byte of output by then
await client.request("bye");
client.close();
process.exitCode = exit_code;
