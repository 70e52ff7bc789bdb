/* What ogc/plan/simulate.py counts, over flat arrays: the same bytes, some hundred times faster.
 *
 * ogc/plan/schedule.py says what runs are and what each holds; functions and fields have the names that they have there.
 * All sets are marks: an item is in the set where its entry equals the number of the set.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { KEPT = 1, REMADE = 2 };
enum { FOUND = 0, NO_PLAN = 1, RUNS_TWICE = 2, NO_MEMORY = 3 };
enum { FORWARD = 0, IN_FORWARD = -1, IN_BACKWARD = -2 };

/* What of the operations depends on the variant that runs. */
typedef struct {
    const int32_t *saves, *save_at; /* operation t saves saves[save_at[t]] up to saves[save_at[t + 1]] */
    const int64_t *internal, *scratch, *backward, *late;
    const double *repeat_seconds;
    const uint8_t *keeps_internals;
} Variant;

/* Fields of eight bytes each, which ogc/plan/fast.py lays out: so are those of Plan and Cost. */
typedef struct {
    int64_t operations, values;
    const int32_t *reads, *read_at, *writes, *write_at;
    Variant variants[2];
    const int64_t *gradient, *bytes;
    const int32_t *takes_over, *saved_tensors; /* takes_over -1: nothing */
    const uint8_t *replayable, *is_cut, *is_output, *is_returned;
    const int32_t *producers, *last_writes, *last_uses;
} Graph;

typedef struct {
    int32_t value, policy;
} Policy;

typedef struct {
    int32_t start, stop, parts, policies; /* how many parts and policies of its own it has */
} Segment;

typedef struct {
    int64_t segments, policies; /* in all, and policies in all runs */
    const Segment *segment;     /* each before its parts, else in program order */
    const Policy *policy;       /* in all runs first, then those of each segment */
    const uint8_t *is_low_memory;
} Plan;

typedef struct {
    int64_t peak_bytes, runs, seen_tensors, alive;
    const int32_t *peak_values; /* of each copy alive at the peak; this and what follows: good until the next plan */
    double recomputed_seconds;
    int64_t step_count;
    const void *steps;         /* Step */
    const int64_t *step_bytes; /* of each step, the most bytes alive */
    const int32_t *needed;     /* of each value, the first step that needs the forward's copy behind it; -1: none */
    int64_t held;              /* bytes alive between forward and backward */
} Cost;

typedef struct {
    int32_t start, stop, parent, segment, is_done;
    int32_t program, program_stop, needs, needs_stop; /* places in State.programs and State.needs */
} Run;

typedef struct {
    int32_t run, operation, during; /* IN_FORWARD, IN_BACKWARD, or the operation whose backward waits */
} Step;

/* A value that a run makes or finds; the last step that needs it, and the next copy with the same last step. */
typedef struct {
    int32_t run, value, last, next, born, gone; /* events; born -1: not yet */
} Copy;

typedef struct {
    const Graph *graph;
    const Plan *plan;
    Run *runs;
    Step *steps;
    Copy *copies;
    int32_t count, step_count, copy_count, program_count, need_count, backward_count, failed;
    int64_t run_room, step_room, copy_room, program_room, need_room, head_room, peak_room;
    int32_t *programs, *needs;
    int32_t *backwards;            /* run, start, stop of saved segments, as their backwards come */
    int32_t *last_part, *previous; /* of a segment; [segments]: of the outermost level */
    int32_t *policy_at;            /* of a segment, its first policy */
    uint8_t *everywhere, *policies, *keeps, *kept; /* everywhere, policies: of all runs, and of the one in question */
    int32_t *leaf_of, *keepers;    /* for each operation, the run that supplies its backward, and its internal tensors */
    int32_t *needed, *wanted, *alive, *read, mark;
    int32_t *made, generation;            /* for each run and value */
    int32_t *place;                       /* for each run and value, its place in copies, if that is there */
    int32_t *head, *peak_values;
    int64_t *step_bytes, bytes_room;
    int32_t *needed_at, *first_step; /* of a value; of a run, its first step, -1: none */
} State;

static void *room_for(State *s, void *items, int64_t *room, int64_t count, size_t size) {
    if (count <= *room) return items;
    void *more = realloc(items, (size_t)(2 * count) * size);
    if (!more) return s->failed = 1, items;
    *room = 2 * count;
    return more;
}

static const Variant *variant(const State *s, int32_t t) { return &s->graph->variants[s->plan->is_low_memory[t]]; }

/* -- runs ------------------------------------------------------------------------------------------------------- */

/* Whether policies name what they can: values, and in a segment those that it makes again. */
static int are_policies(const Graph *g, const Policy *policy, int64_t count, int32_t start, int32_t stop) {
    for (int64_t i = 0; i < count; i++) {
        int32_t v = policy[i].value;
        if (v < 0 || v >= g->values || g->producers[v] < start || g->producers[v] >= stop) return 0;
        if (policy[i].policy != KEPT && policy[i].policy != REMADE) return 0;
    }
    return 1;
}

/* Read a segment and its parts, which begin where those before them stop; the number of the next one, or -1. */
static int64_t read_segment(State *s, int64_t i, int64_t around, int32_t begin) {
    const Graph *g = s->graph;
    const Segment *one = s->plan->segment + i;
    if (one->start != begin || one->stop <= begin || one->stop > g->operations || !g->is_cut[one->stop]) return -1;
    if (one->policies && !one->parts) return -1;
    s->policy_at[i + 1] = s->policy_at[i] + one->policies;
    if (!are_policies(g, s->plan->policy + s->policy_at[i], one->policies, one->start, one->stop)) return -1;
    s->previous[i] = s->last_part[around];
    s->last_part[around] = (int32_t)i;
    s->last_part[i] = -1;
    int64_t next = i + 1;
    for (int32_t n = 0; n < one->parts && next >= 0; n++, begin = next < 0 ? 0 : s->plan->segment[s->last_part[i]].stop)
        next = read_segment(s, next, i, begin);
    return next >= 0 && (!one->parts || begin == one->stop) ? next : -1;
}

/* Whether segments cover what they are parts of, in order, between cuts; policies name what they can. */
static int is_plan(State *s) {
    const Plan *p = s->plan;
    int32_t stop = 0;
    s->last_part[p->segments] = -1;
    s->policy_at[0] = (int32_t)p->policies;
    for (int64_t i = 0; i < p->segments;) {
        int64_t first = i;
        if ((i = read_segment(s, i, p->segments, stop)) < 0) return 0;
        stop = p->segment[first].stop;
    }
    return stop == s->graph->operations && are_policies(s->graph, p->policy, p->policies, 0, stop);
}

static void visit(State *s, int32_t number, int32_t part) {
    const Segment *segments = s->plan->segment;
    for (; part >= 0; part = s->previous[part]) {
        const Segment *one = segments + part;
        if (one->parts) {
            int32_t child = s->count++;
            s->runs[child] = (Run){.start = one->start, .stop = one->stop, .parent = number, .segment = part};
            visit(s, child, s->last_part[part]);
        } else {
            int32_t *entry = s->backwards + 3 * s->backward_count++;
            entry[0] = number, entry[1] = one->start, entry[2] = one->stop;
            for (int32_t t = one->start; t < one->stop; t++) s->leaf_of[t] = number;
        }
    }
}

/* The policies that hold in a run beside those of all runs: those of segments around it go before its own. */
static void set_policies(State *s, int32_t number, int is_on) {
    for (int32_t run = number; run > FORWARD; run = s->runs[run].parent)
        for (int32_t i = s->policy_at[s->runs[run].segment]; i < s->policy_at[s->runs[run].segment + 1]; i++)
            s->policies[s->plan->policy[i].value] = is_on ? (uint8_t)s->plan->policy[i].policy : 0;
}

static int is_remade(const State *s, const Run *run, int32_t v) {
    uint8_t policy = s->everywhere[v] ? s->everywhere[v] : s->policies[v];
    if (policy) return policy == REMADE;
    return s->graph->producers[v] >= run->start && s->graph->last_uses[v] < run->stop;
}

static int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }
static int32_t most(int32_t a, int32_t b) { return a > b ? a : b; }

static int32_t want(State *s, int32_t v, int32_t first) {
    s->wanted[v] = s->mark;
    return least(first, s->graph->producers[v]);
}

static void set_needed(State *s, int32_t v) {
    if (s->needed[v] != s->mark) s->needs[s->need_count++] = v;
    s->needed[v] = s->mark;
}

static int32_t need(State *s, const Run *run, int32_t v, int32_t first) {
    set_needed(s, v);
    return s->wanted[v] != s->mark && is_remade(s, run, v) ? want(s, v, first) : first;
}

/* Find what a run must run again, from what is needed backwards; runs inside it come first. */
static int write_program(State *s, int32_t number) {
    const Graph *g = s->graph;
    Run *run = s->runs + number;
    int32_t first = run->start, complete = 0;
    s->mark++;
    s->needs = room_for(s, s->needs, &s->need_room, s->need_count + g->values, sizeof *s->needs);
    if (s->failed) return NO_MEMORY;
    run->needs = s->need_count;
    set_policies(s, number, 1);
    for (int32_t t = run->start; t < run->stop; t++) {
        if (s->leaf_of[t] != number) continue;
        const Variant *f = variant(s, t);
        for (int32_t i = f->save_at[t]; i < f->save_at[t + 1]; i++) first = need(s, run, f->saves[i], first);
        if (f->internal[t] && !s->keeps[t]) s->alive[t] = s->mark;
    }
    for (int32_t child = number + 1; child < s->count; child++)
        if (s->runs[child].parent == number)
            for (int32_t i = s->runs[child].needs; i < s->runs[child].needs_stop; i++)
                first = need(s, run, s->needs[i], first);
    while (!complete) {
        complete = 1;
        for (int32_t t = run->stop - 1; t >= first; t--) {
            int is_alive = s->alive[t] == s->mark;
            for (int32_t i = g->write_at[t]; i < g->write_at[t + 1] && !is_alive; i++)
                is_alive = s->wanted[g->writes[i]] == s->mark;
            if (!is_alive) continue;
            s->alive[t] = s->mark;
            for (int32_t i = g->read_at[t]; i < g->read_at[t + 1]; i++) {
                int32_t v = g->reads[i];
                if (s->wanted[v] == s->mark || !(t <= g->last_writes[v] || is_remade(s, run, v))) continue;
                first = want(s, v, first);
                complete &= g->last_writes[v] <= t; /* in-place operations may ask for writers behind them */
            }
        }
    }
    s->programs = room_for(s, s->programs, &s->program_room, s->program_count + run->stop - first, sizeof *s->programs);
    if (s->failed) return NO_MEMORY;
    run->program = s->program_count;
    int32_t *made = s->made + (int64_t)number * g->values, result = FOUND;
    for (int32_t t = first; t < run->stop; t++) {
        if (s->alive[t] != s->mark) continue;
        if (!g->replayable[t]) result = RUNS_TWICE;
        s->programs[s->program_count++] = t;
        for (int32_t i = g->write_at[t]; i < g->write_at[t + 1]; i++) {
            int32_t v = g->writes[i];
            if (s->alive[g->last_writes[v]] == s->mark && is_remade(s, run, v)) made[v] = s->generation;
        }
        for (int32_t i = g->read_at[t]; i < g->read_at[t + 1]; i++)
            if (t > g->last_writes[g->reads[i]]) set_needed(s, g->reads[i]);
    }
    run->program_stop = s->program_count;
    int32_t stop = s->need_count;
    s->need_count = run->needs;
    for (int32_t i = run->needs; i < stop; i++)
        if (made[s->needs[i]] != s->generation) s->needs[s->need_count++] = s->needs[i];
    run->needs_stop = s->need_count;
    set_policies(s, number, 0);
    return result;
}

/* -- steps ------------------------------------------------------------------------------------------------------ */

static int32_t source(const State *s, int32_t number, int32_t v) {
    while (number != FORWARD && s->made[(int64_t)number * s->graph->values + v] != s->generation)
        number = s->runs[number].parent;
    return number;
}

static void set_keepers(State *s) {
    for (int32_t t = 0; t < s->graph->operations; t++) s->keepers[t] = FORWARD;
    for (int32_t number = 1; number < s->count; number++)
        for (int32_t i = s->runs[number].program; i < s->runs[number].program_stop; i++) {
            int32_t t = s->programs[i];
            if (s->leaf_of[t] == number && variant(s, t)->internal[t] && !s->keeps[t]) s->keepers[t] = number;
        }
}

static int asks_for(const State *s, int32_t number, int32_t t) {
    const Variant *f = variant(s, t);
    if (s->keepers[t] == number) return 1;
    for (int32_t i = f->save_at[t]; i < f->save_at[t + 1]; i++)
        if (source(s, number, f->saves[i]) != FORWARD) return 1;
    return 0;
}

/* Carry out a run, those around it before it. */
static void run_again(State *s, int32_t number, int32_t during) {
    Run *run = s->runs + number;
    if (number == FORWARD || run->is_done) return;
    run_again(s, run->parent, during);
    run->is_done = 1;
    for (int32_t i = run->program; i < run->program_stop; i++)
        s->steps[s->step_count++] = (Step){number, s->programs[i], during};
}

static int set_steps(State *s) {
    int64_t most = 2 * (int64_t)s->graph->operations + s->program_count;
    s->steps = room_for(s, s->steps, &s->step_room, most, sizeof *s->steps);
    if (s->failed) return NO_MEMORY;
    for (int32_t t = 0; t < s->graph->operations; t++) s->steps[s->step_count++] = (Step){FORWARD, t, IN_FORWARD};
    for (int32_t i = 0; i < s->backward_count; i++) {
        int32_t number = s->backwards[3 * i];
        for (int32_t t = s->backwards[3 * i + 2] - 1; t >= s->backwards[3 * i + 1]; t--) {
            if (number != FORWARD && !s->runs[number].is_done && asks_for(s, number, t)) run_again(s, number, t);
            s->steps[s->step_count++] = (Step){number, t, IN_BACKWARD};
        }
    }
    return FOUND;
}

/* -- memory ----------------------------------------------------------------------------------------------------- */

/* The copy of a value that a run makes or finds; NULL if no step has made or needed it. */
static Copy *copy_of(const State *s, int32_t run, int32_t v) {
    int32_t place = s->place[(int64_t)run * s->graph->values + v];
    Copy *copy = s->copies + place;
    return place < s->copy_count && copy->run == run && copy->value == v ? copy : NULL;
}

/* Note that a step needs the copy of a run; a recomputation begins with all that it starts from. */
static void note(State *s, int32_t run, int32_t v, int32_t step) {
    Copy *copy = copy_of(s, run, v);
    if (run == FORWARD && step >= s->graph->operations) {
        const Step *at = s->steps + step;
        int32_t begins = at->during == IN_BACKWARD ? step : s->first_step[at->run];
        if (s->needed_at[v] < 0 || begins < s->needed_at[v]) s->needed_at[v] = begins;
    }
    if (!copy) {
        copy = s->copies + s->copy_count;
        *copy = (Copy){.run = run, .value = v, .born = -1};
        s->place[(int64_t)run * s->graph->values + v] = s->copy_count++;
    }
    copy->last = step;
}

/* For each step, a list of the copies that none behind it makes or needs. */
static int set_last_needs(State *s) {
    const Graph *g = s->graph;
    s->copies = room_for(s, s->copies, &s->copy_room, s->count * g->values, sizeof *s->copies);
    s->head = room_for(s, s->head, &s->head_room, s->step_count, sizeof *s->head);
    s->step_bytes = room_for(s, s->step_bytes, &s->bytes_room, s->step_count, sizeof *s->step_bytes);
    if (s->failed) return NO_MEMORY;
    memset(s->step_bytes, 0, (size_t)s->step_count * sizeof *s->step_bytes);
    memset(s->needed_at, -1, (size_t)g->values * sizeof *s->needed_at);
    for (int32_t n = s->step_count - 1; n >= 0; n--)
        if (s->steps[n].during >= 0) s->first_step[s->steps[n].run] = n;
    for (int32_t n = 0; n < s->step_count; n++) {
        const Step *step = s->steps + n;
        int32_t t = step->operation;
        s->head[n] = -1;
        if (step->during == IN_BACKWARD) {
            const Variant *f = variant(s, t);
            for (int32_t i = f->save_at[t]; i < f->save_at[t + 1]; i++)
                note(s, source(s, step->run, f->saves[i]), f->saves[i], n);
            continue;
        }
        for (int32_t i = g->write_at[t]; i < g->write_at[t + 1]; i++) note(s, step->run, g->writes[i], n);
        for (int32_t i = g->read_at[t]; i < g->read_at[t + 1]; i++) {
            int32_t v = g->reads[i];
            note(s, t <= g->last_writes[v] ? step->run : source(s, step->run, v), v, n);
        }
    }
    for (int32_t i = 0; i < s->copy_count; i++) {
        Copy *copy = s->copies + i;
        if (copy->run == FORWARD && g->is_returned[copy->value] && !g->is_output[copy->value])
            copy->last = most(copy->last, (int32_t)g->operations - 1);
        copy->next = s->head[copy->last];
        s->head[copy->last] = i;
    }
    return FOUND;
}

typedef struct {
    int64_t live, peak, *step_bytes; /* of the step in question */
    int32_t events, peak_event;
} Memory;

static void record(Memory *m, int64_t extra) {
    if (m->live + extra > *m->step_bytes) *m->step_bytes = m->live + extra;
    if (m->live + extra > m->peak) m->peak = m->live + extra, m->peak_event = m->events;
    m->events++;
}

static void drop(State *s, Memory *m, Copy *copy) {
    if (copy->born < 0 || copy->gone >= 0) return;
    copy->gone = m->events;
    m->live -= s->graph->bytes[copy->value];
}

static void drop_done(State *s, Memory *m, int32_t step) {
    for (int32_t i = s->head[step]; i >= 0; i = s->copies[i].next)
        if (s->copies[i].run != FORWARD || !s->graph->is_output[s->copies[i].value]) drop(s, m, s->copies + i);
}

static void take(State *s, Memory *m, int32_t n) {
    const Graph *g = s->graph;
    const Step step = s->steps[n];
    int32_t t = step.operation, taken = g->takes_over[t];
    m->step_bytes = s->step_bytes + n;
    const Variant *f = variant(s, t);
    if (step.during == IN_BACKWARD) {
        record(m, f->backward[t]);
        drop_done(s, m, n);
        if (f->late[t]) record(m, f->late[t]);
        m->live -= f->internal[t];
        return;
    }
    for (int32_t i = g->write_at[t]; i < g->write_at[t + 1]; i++) {
        Copy *copy = copy_of(s, step.run, g->writes[i]);
        if (copy->born >= 0 && copy->gone < 0) continue;
        copy->born = m->events, copy->gone = -1;
        m->live += g->bytes[copy->value];
    }
    if (taken >= 0) {
        Copy *copy = copy_of(s, step.run, taken);
        if (copy && copy->last == n) drop(s, m, copy);
    }
    record(m, (step.during >= 0 ? g->gradient[step.during] : 0) + f->internal[t] + f->scratch[t]);
    if (step.run == s->keepers[t]) m->live += f->internal[t];
    drop_done(s, m, n);
}

/* -- from outside ----------------------------------------------------------------------------------------------- */

State *ogc_new(const Graph *graph) {
    State *s = calloc(1, sizeof *s);
    size_t n = (size_t)graph->operations + 1, v = (size_t)graph->values + 1;
    if (!s) return NULL;
    s->graph = graph;
    s->leaf_of = calloc(n, sizeof(int32_t)), s->keepers = calloc(n, sizeof(int32_t));
    s->alive = calloc(n, sizeof(int32_t)), s->keeps = calloc(n, 1);
    s->everywhere = calloc(v, 1), s->policies = calloc(v, 1), s->kept = calloc(v, 1);
    s->needed = calloc(v, sizeof(int32_t)), s->wanted = calloc(v, sizeof(int32_t));
    s->failed = !(s->leaf_of && s->keepers && s->alive && s->keeps && s->everywhere && s->policies && s->kept);
    s->needed_at = calloc(v, sizeof(int32_t));
    s->failed |= !(s->needed && s->wanted && s->needed_at);
    return s;
}

void ogc_delete(State *s) {
    void *all[] = {s->runs, s->steps, s->copies, s->programs, s->needs, s->backwards, s->last_part, s->previous,
                   s->policy_at, s->everywhere, s->policies, s->keeps, s->kept, s->leaf_of, s->keepers, s->needed,
                   s->wanted, s->alive, s->made, s->place, s->head, s->peak_values, s};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

/* Room for so many segments, each of which may be a run. */
static void set_room(State *s, int64_t segments) {
    int64_t runs = 2 * (segments + 1), copies = runs * s->graph->values;
    if (segments + 1 <= s->run_room) return;
    free(s->made), free(s->place);
    s->made = calloc((size_t)copies + 1, sizeof(int32_t)), s->place = calloc((size_t)copies + 1, sizeof(int32_t));
    free(s->runs), free(s->backwards), free(s->last_part), free(s->previous), free(s->policy_at);
    free(s->first_step);
    s->first_step = malloc((size_t)runs * sizeof *s->first_step);
    s->runs = malloc((size_t)runs * sizeof *s->runs);
    s->backwards = malloc(3 * (size_t)runs * sizeof(int32_t));
    s->last_part = malloc((size_t)runs * sizeof(int32_t)), s->previous = malloc((size_t)runs * sizeof(int32_t));
    s->policy_at = malloc((size_t)runs * sizeof(int32_t));
    s->failed |= !(s->made && s->place && s->runs && s->backwards && s->last_part && s->previous && s->policy_at);
    s->failed |= !s->first_step;
    s->run_room = runs;
}

/* The cost of a plan: FOUND, or why there is none. */
int ogc_replay(State *s, const Plan *plan, Cost *cost) {
    const Graph *g = s->graph;
    s->plan = plan;
    s->count = s->step_count = s->copy_count = s->program_count = s->need_count = s->backward_count = 0;
    set_room(s, plan->segments);
    if (s->failed) return NO_MEMORY;
    s->generation++;
    if (!is_plan(s)) return NO_PLAN;
    s->runs[s->count++] = (Run){.stop = (int32_t)g->operations, .parent = -1, .segment = -1, .is_done = 1};
    visit(s, FORWARD, s->last_part[plan->segments]);

    memset(s->kept, 0, (size_t)g->values), memset(s->everywhere, 0, (size_t)g->values);
    for (int64_t i = 0; i < plan->policies; i++) s->everywhere[plan->policy[i].value] = (uint8_t)plan->policy[i].policy;
    for (int64_t i = 0; i < plan->policies; i++) s->kept[plan->policy[i].value] |= plan->policy[i].policy == KEPT;
    for (int32_t part = s->last_part[plan->segments]; part >= 0; part = s->previous[part])
        for (int32_t i = s->policy_at[part]; i < s->policy_at[part + 1]; i++)
            s->kept[plan->policy[i].value] |= plan->policy[i].policy == KEPT;
    for (int32_t t = 0; t < g->operations; t++) {
        int all_kept = g->write_at[t] < g->write_at[t + 1];
        for (int32_t i = g->write_at[t]; i < g->write_at[t + 1]; i++) all_kept &= s->kept[g->writes[i]];
        s->keeps[t] = variant(s, t)->keeps_internals[t] || all_kept;
    }
    for (int32_t number = s->count - 1; number > FORWARD; number--) {
        int result = write_program(s, number);
        if (result != FOUND) return result;
    }
    set_keepers(s);
    if (set_steps(s) != FOUND || set_last_needs(s) != FOUND) return NO_MEMORY;

    Memory memory = {.peak = -1};
    int64_t held = 0;
    for (int32_t n = 0; n < s->step_count; n++) {
        take(s, &memory, n);
        if (n == g->operations - 1) held = memory.live;
    }
    *cost = (Cost){.peak_bytes = memory.peak > 0 ? memory.peak : 0, .runs = s->count - 1, .held = held};
    cost->step_count = s->step_count, cost->steps = s->steps, cost->step_bytes = s->step_bytes;
    cost->needed = s->needed_at;
    for (int32_t number = 1; number < s->count; number++)
        for (int32_t i = s->runs[number].program; i < s->runs[number].program_stop; i++)
            cost->recomputed_seconds += variant(s, s->programs[i])->repeat_seconds[s->programs[i]];
    for (int32_t t = 0; t < g->operations; t++)
        if (s->leaf_of[t] != FORWARD) cost->seen_tensors += g->saved_tensors[t];
    s->peak_values = room_for(s, s->peak_values, &s->peak_room, s->copy_count, sizeof *s->peak_values);
    if (s->failed) return NO_MEMORY;
    for (int32_t i = 0; i < s->copy_count; i++) {
        const Copy *copy = s->copies + i;
        if (copy->born >= 0 && copy->born <= memory.peak_event && (copy->gone < 0 || memory.peak_event < copy->gone))
            s->peak_values[cost->alive++] = copy->value;
    }
    cost->peak_values = s->peak_values;
    return FOUND;
}
