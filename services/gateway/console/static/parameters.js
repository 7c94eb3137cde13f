// The form beside the conversation, as parameters of a request.

const byId = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];

// The error of a field with an invalid value.
export class InvalidField extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

export const mode = () => document.querySelector("input[name=mode]:checked").value;

export const samples = () => Number(byId("n").value) || 1;

// Returns the parameters of a request, without its prompt. Throws `InvalidField`.
export function parameters() {
  const body = { model: byId("model").value, stream: true, stream_options: { include_usage: true } };
  for (const name of [...NUMBERS, "n", "top_logprobs"]) {
    if (!byId(name).validity.valid) {
      const label = document.querySelector(`label[for=${name}]`).textContent;
      throw new InvalidField(byId(name), `${label}: ${byId(name).validationMessage}`);
    }
  }
  for (const name of NUMBERS) if (byId(name).value !== "") body[name] = Number(byId(name).value);
  if (samples() > 1) body.n = samples();
  const stop = byId("stop").value.split("\n").filter((line) => line !== "");
  if (stop.length) body.stop = stop;
  if (byId("schema").value.trim()) body.response_format = schema();
  if (byId("logprobs").checked) {
    const most = Number(byId("top_logprobs").value) || 0;
    if (mode() === "chat") Object.assign(body, { logprobs: true, top_logprobs: most });
    else body.logprobs = most;
  }
  return body;
}

function schema() {
  try {
    return { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(byId("schema").value) } };
  } catch (error) {
    throw new InvalidField(byId("schema"), `JSON schema of the answer: ${error.message}`);
  }
}

export function fillModels(models) {
  byId("model").replaceChildren(...models.map((model) => new Option(model.id)));
}
