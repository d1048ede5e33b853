// Node.js: timers, promises, streams, a worker thread, a child process, a TCP server, a thread pool at work.
'use strict';
const crypto = require('crypto'), fs = require('fs'), net = require('net');
const { Worker } = require('worker_threads'), { fork } = require('child_process'), assert = require('assert');

if (process.argv[2] === 'child') {
  process.on('message', (word) => process.send(word + 1));
} else {
  const nonce = crypto.randomBytes(8).toString('hex');
  const secret = (label) => crypto.createHash('sha256').update(nonce + label).digest('hex');
  const history = new Map();
  let ticks = 0, steps = 0;
  const within = (promise, what) =>
    Promise.race([promise, new Promise((_, no) => setTimeout(() => no(new Error(what + ' does not answer')), 30000).unref())]);
  const once = (emitter, event, what) => within(new Promise((yes) => emitter.once(event, yes)), what);
  const stop = process.env.STATE_STOP || 'stop';
  process.on('unhandledRejection', (error) => { fs.writeSync(1, 'FATAL ' + error.message + '\n'); process.exit(70); });

  (async () => {
    const worker = new Worker('require("worker_threads").parentPort.on("message", n => require("worker_threads").parentPort.postMessage(n * 2))', { eval: true });
    const child = fork(process.argv[1], ['child']);
    const server = net.createServer((socket) => socket.pipe(socket)).listen(0, '127.0.0.1');
    await once(server, 'listening', 'the server');
    const client = net.connect(server.address().port, '127.0.0.1');
    await once(client, 'connect', 'the connection');
    setInterval(() => { ticks++; }, 10);
    fs.writeSync(1, 'ready ' + nonce + '\n');
    while (!fs.existsSync(stop)) {
      steps++;
      history.set(steps, secret(steps));
      const before = ticks;
      worker.postMessage(steps);
      assert.strictEqual(await once(worker, 'message', 'the worker thread'), steps * 2);
      child.send(steps);
      assert.strictEqual(await once(child, 'message', 'the child process'), steps + 1);
      client.write(secret(steps));
      assert.strictEqual(String(await once(client, 'data', 'the TCP connection')), secret(steps));
      await within(fs.promises.writeFile('file', secret(steps)), 'the thread pool');
      assert.strictEqual(await fs.promises.readFile('file', 'utf8'), secret(steps));
      await within(new Promise((yes) => crypto.pbkdf2('x', nonce, 10, 16, 'sha256', yes)), 'the thread pool');
      await within(new Promise((yes) => setTimeout(yes, 25)), 'a timer');
      assert.ok(ticks > before, 'the interval stands still');
      const old = 1 + (steps * 7) % history.size;
      assert.strictEqual(history.get(old), secret(old));
    }
    fs.writeSync(1, 'pass ' + nonce + ' ' + steps + '\n');
    process.exit(0);
  })();
}
