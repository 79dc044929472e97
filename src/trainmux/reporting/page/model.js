// The embedded JSON, decoded into what the charts draw.
const data = JSON.parse(document.getElementById("plan-data").textContent);
const LANE_LABELS = ["compute", "to host", "to device"];
const PHASES = { f: "forward", b: "backward", u: "update" };

// The stack from the bottom up: what libraries and graphs keep, each byte class, the running node's workspace.
const LAYERS = [
  { name: "libraries and graphs", color: "--class-fixed" },
  ...data.classes.map((name) => ({ name, color: `--class-${name.replace(/ /g, "-")}` })),
];

function profileOf(subArray) {
  return data.profiles[data.subArrays[subArray].profile];
}

function nodeName(subArray, rank) {
  return profileOf(subArray).nodes[rank];
}

function tensorOf(subArray, position) {
  const profile = profileOf(subArray);
  return {
    name: profile.tensors[position],
    className: data.classes[profile.classes[position]],
    bytes: profile.sizes[position],
  };
}

function instructionAt(position, instructions = data.instructions) {
  const { kinds, subArrays, items, keeps } = instructions;
  const kind = kinds[position];
  const subArray = subArrays[position];
  const item = items[position];
  if (kind === "C" || kind === "R") {
    const phase = profileOf(subArray).phases[item];
    return { kind, subArray, item, phase, name: nodeName(subArray, item), keeps: keeps[position] ?? [] };
  }
  return { kind, subArray, item, phase: "f", ...tensorOf(subArray, item), keeps: [] };
}

function kindInWords(instruction) {
  switch (instruction.kind) {
    case "C":
      return PHASES[instruction.phase];
    case "R":
      return "recompute";
    case "O":
      return "offload to the host";
    default:
      return "prefetch from the host";
  }
}

function titleOf(instruction) {
  const verb = { R: "recompute ", O: "offload ", P: "prefetch " }[instruction.kind] ?? "";
  return verb + instruction.name;
}

function decodeMemory(memory) {
  const length = memory.times.length;
  const bytes = LAYERS.map(() => new Float64Array(length));
  const now = new Float64Array(LAYERS.length);
  now[0] = data.fixed;
  let next = 0;
  for (let step = 0; step < length; step += 1) {
    while (next < memory.changes.length && memory.changes[next] === step) {
      now[memory.changes[next + 1] + 1] = memory.changes[next + 2];
      next += 3;
    }
    for (let layer = 0; layer < LAYERS.length; layer += 1) bytes[layer][step] = now[layer];
  }
  const tops = bytes.map(() => new Float64Array(length));
  let peak = -1;
  for (let step = 0; step < length; step += 1) {
    let top = 0;
    for (let layer = 0; layer < LAYERS.length; layer += 1) {
      top += bytes[layer][step];
      tops[layer][step] = top;
    }
    if (peak < 0 || top > tops[LAYERS.length - 1][peak]) peak = step;
  }
  return {
    times: Float64Array.from(memory.times),
    instructions: memory.instructions,
    bytes,
    tops,
    totals: tops[LAYERS.length - 1],
    peak,
  };
}

function decodeLanes(spans) {
  const lanes = LANE_LABELS.map(() => ({ instructions: [], starts: [], ends: [] }));
  for (let index = 0; index < spans.instructions.length; index += 1) {
    const lane = lanes[Number(spans.lanes[index])];
    lane.instructions.push(spans.instructions[index]);
    lane.starts.push(spans.starts[index]);
    lane.ends.push(spans.starts[index] + spans.durations[index]);
  }
  return lanes;
}

function decodeTimeline(timeline) {
  const lanes = decodeLanes(timeline.spans);
  const placeOf = new Map();
  lanes.forEach((lane, number) => {
    lane.instructions.forEach((instruction, index) => placeOf.set(instruction, { lane: number, index }));
  });
  return {
    source: timeline.source,
    duration: timeline.duration,
    lanes,
    placeOf,
    stalls: {
      starts: timeline.stalls.starts,
      ends: timeline.stalls.starts.map((start, index) => start + timeline.stalls.durations[index]),
      waitsFor: timeline.stalls.waitsFor,
    },
    memory: decodeMemory(timeline.memory),
    memoryIsPredicted: timeline.memoryIsPredicted,
  };
}

const timelines = data.timelines.map(decodeTimeline);
const horizon = Math.max(1, ...timelines.map((timeline) => timeline.duration));
const usedLayers = LAYERS.map((_, layer) => layer).filter((layer) =>
  timelines.some(({ memory }) => memory.bytes[layer].some((bytes) => bytes > 0)),
);

function spanOf(timeline, instruction) {
  const place = timeline.placeOf.get(instruction);
  if (!place) return null;
  const lane = timeline.lanes[place.lane];
  return { start: lane.starts[place.index], end: lane.ends[place.index], ...place };
}
