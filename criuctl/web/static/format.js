// Numbers and times for people; the same words as the command line's.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function size(bytes) {
  let value = Number(bytes ?? 0),
    unit = 0;
  while (Math.abs(value) >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return unit === 0 || Math.abs(value) >= 100 ? `${Math.round(value)} ${UNITS[unit]}` : `${value.toFixed(1)} ${UNITS[unit]}`;
}

/** Processors in use, as per cent of one of them. */
export function percent(processors) {
  const value = processors * 100;
  return value > 0 && value < 0.5 ? "< 1 %" : `${Math.round(value)} %`;
}

export function duration(milliseconds) {
  if (milliseconds === null || milliseconds === undefined) return "–";
  if (milliseconds < 1000) return `${Math.round(milliseconds)} ms`;
  const seconds = milliseconds / 1000;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  const minutes = Math.floor(seconds / 60);
  return minutes < 60 ? `${minutes} min ${Math.round(seconds % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** How long ago, in one unit. */
export function age(time) {
  const then = Date.parse(time);
  if (Number.isNaN(then)) return "–";
  const seconds = Math.max(0, (Date.now() - then) / 1000);
  for (const [name, length] of [
    ["d", 86400],
    ["h", 3600],
    ["min", 60],
  ]) {
    if (seconds >= length * (name === "d" ? 2 : 1)) return `${Math.floor(seconds / length)} ${name} ago`;
  }
  return seconds < 5 ? "just now" : `${Math.floor(seconds)} s ago`;
}

/** For how long already. */
export function lasting(time) {
  const found = age(time);
  return found === "just now" ? "for a moment" : found === "–" ? "" : `for ${found.replace(/ ago$/, "")}`;
}

export function when(time) {
  const then = new Date(time);
  return Number.isNaN(then.getTime()) ? "–" : then.toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" });
}

/** A moment that is not far: the time alone, if it is today. */
export function until(time) {
  const then = new Date(time);
  if (Number.isNaN(then.getTime())) return "–";
  const today = then.toDateString() === new Date().toDateString();
  return then.toLocaleString(undefined, today ? { timeStyle: "short" } : { dateStyle: "short", timeStyle: "short" });
}

export function command(words) {
  const plain = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);
  return (words ?? []).map(plain).join(" ").replace(/\s+/g, " ");
}

export function plural(count, one, many = `${one}s`) {
  return `${count} ${count === 1 ? one : many}`;
}
