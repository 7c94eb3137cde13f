// node client.js [HOST:PORT]
// TOKA_API_KEY: a key. TOKA_GRPC_CA: TLS; with TOKA_GRPC_CERT and TOKA_GRPC_KEY, mTLS. All three name PEM files.

import { readFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import * as grpc from '@grpc/grpc-js';
import { loadSync } from '@grpc/proto-loader';

const PROMPT = 'Question: Tom buys 3 books for $7 each and 4 pens for $2 each. How much does he pay?\nAnswer:';
const PATIENCE_MS = 60_000;

const here = (path) => fileURLToPath(new URL(path, import.meta.url));
const definitions = loadSync(['tokasaurus/scheduler/v1/scheduler.proto', 'google/rpc/error_details.proto'], {
  includeDirs: [here('../../../protos'), here('..')],
  keepCase: true,
  enums: String,
  longs: Number,
  oneofs: true,
});
const { SchedulerService } = grpc.loadPackageDefinition(definitions).tokasaurus.scheduler.v1;

/** A stub, and what every call of it says about its caller. */
function connect(address) {
  const { TOKA_GRPC_CA, TOKA_GRPC_CERT, TOKA_GRPC_KEY, TOKA_API_KEY } = process.env;
  const read = (path) => (path ? readFileSync(path) : null);
  const credentials = TOKA_GRPC_CA
    ? grpc.credentials.createSsl(read(TOKA_GRPC_CA), read(TOKA_GRPC_KEY), read(TOKA_GRPC_CERT))
    : grpc.credentials.createInsecure();
  const metadata = new grpc.Metadata();
  if (TOKA_API_KEY) metadata.set('authorization', `Bearer ${TOKA_API_KEY}`);
  const client = new SchedulerService(address, credentials, {
    'grpc.keepalive_time_ms': 30_000,
    'grpc.max_receive_message_length': 64 * 1024 * 1024,
  });
  return { client, metadata };
}

const within = (ms) => ({ deadline: Date.now() + ms });

async function showModel({ client, metadata }) {
  const { model } = await new Promise((resolve, reject) => {
    client.GetModel({}, metadata, within(PATIENCE_MS), (error, answer) => (error ? reject(error) : resolve(answer)));
  });
  console.log(`model: ${model.id}, contract ${model.contract_version}, ${model.max_context_tokens} tokens of context`);
}

/** Text as it comes. The first message accepts the request; the last of a sample has its `finish`. */
async function stream({ client, metadata }) {
  const request = { text: PROMPT, sampling: { temperature: 0 }, stopping: { max_tokens: 100 } };
  for await (const { accepted, outputs } of client.Generate(request, metadata, within(PATIENCE_MS))) {
    if (accepted) process.stdout.write(`accepted: ${accepted.prompt_tokens} prompt tokens\nanswer:`);
    for (const { text, finish } of outputs?.samples ?? []) {
      process.stdout.write(text ?? '');
      if (finish) console.log(`\nfinish: ${finish.reason}, ${finish.usage.completion_tokens} tokens`);
      if (finish?.error) report(finish.error.code, finish.error.message, finish.error.details);
    }
  }
}

/** Cancelling the call ends the request: its place in the batch goes to others at once. */
async function cancel({ client, metadata }) {
  const call = client.Generate({ text: PROMPT, stopping: { ignore_eos: true } }, metadata, within(PATIENCE_MS));
  let tokens = 0;
  try {
    for await (const { outputs } of call) {
      for (const { token_ids } of outputs?.samples ?? []) tokens += token_ids?.length ?? 0;
      if (tokens >= 5) call.cancel();
    }
  } catch (error) {
    if (error.code !== grpc.status.CANCELLED) throw error;
    console.log('cancelled: CANCELLED');
  }
}

/** Client and server both watch the deadline: the sample ends with a finish, or the call with a status, or both. */
async function deadline({ client, metadata }) {
  const request = { text: PROMPT, stopping: { ignore_eos: true } };
  let ended = 'never';
  try {
    for await (const { outputs } of client.Generate(request, metadata, within(500))) {
      for (const { finish } of outputs?.samples ?? []) if (finish) ended = finish.reason;
    }
  } catch (error) {
    if (error.code !== grpc.status.DEADLINE_EXCEEDED) throw error;
    ended = grpc.status[error.code];
  }
  console.log(`deadline: ${ended}`);
}

async function beRefused({ client, metadata }) {
  const request = { text: PROMPT, sampling: { top_p: 3 } };
  try {
    for await (const _ of client.Generate(request, metadata, within(PATIENCE_MS)));
  } catch (error) {
    reportError(error);
  }
}

/** What a failed call tells: a code, and a google.rpc.Status in its trailing metadata. */
function reportError(error, print = console.log) {
  const [encoded] = error.metadata?.get('grpc-status-details-bin') ?? [];
  const details = encoded ? definitions['google.rpc.Status'].deserialize(encoded).details : [];
  report(error.code, error.details ?? error.message, details, print);
}

function report(code, message, details, print = console.log) {
  const found = {};
  for (const { type_url, value } of details ?? []) {
    const name = type_url.split('/').pop();
    found[name] = definitions[name]?.deserialize(value);
  }
  print(`error: ${grpc.status[code] ?? code}, ${found['google.rpc.ErrorInfo']?.reason ?? 'no reason'}`);
  print(`message: ${message}`);
  for (const { field } of found['google.rpc.BadRequest']?.field_violations ?? []) print(`field: ${field}`);
  const delay = found['google.rpc.RetryInfo']?.retry_delay;
  if (delay) print(`retry: after ${(delay.seconds ?? 0) * 1000 + (delay.nanos ?? 0) / 1e6} ms`);
}

const connection = connect(process.argv[2] ?? '127.0.0.1:10310');
try {
  for (const part of [showModel, stream, cancel, deadline, beRefused]) await part(connection);
} catch (error) {
  if (error.code === undefined) throw error;
  reportError(error, console.error);
  process.exitCode = 1;
} finally {
  connection.client.close();
}
