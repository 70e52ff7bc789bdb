/* What ogc/plan/simulate.py counts, over flat arrays: the same bytes, some hundred times faster.
 *
 * ogc/plan/schedule.py says what runs are and what each holds; functions and fields have the names that they have there.
 * All sets are marks: an item is in the set where its entry equals the number of the set.
 */
#include <stdint.h>
#include <stdlib.h>

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
    int64_t segments, policies;
    const int32_t *start, *stop, *parent; /* a segment before its parts, else in program order; parent -1: outermost */
    const uint8_t *is_recomputed;
    const int32_t *segment, *value; /* of policies; segment -1: in all runs */
    const uint8_t *policy, *is_low_memory;
} Plan;

typedef struct {
    int64_t peak_bytes, runs, seen_tensors, alive;
    const int32_t *peak_values; /* of each copy alive at the peak; good until the next plan */
    double recomputed_seconds;
} Cost;

typedef struct {
    int32_t start, stop, parent, segment, is_done;
    int32_t program, program_stop, needs, needs_stop; /* places in State.programs and State.needs */
} Run;

typedef struct {
    int32_t run, operation, during; /* IN_FORWARD, IN_BACKWARD, or the operation whose backward waits */
} Step;

typedef struct {
    int32_t value, born, gone;
} Life;

typedef struct {
    const Graph *graph;
    const Plan *plan;
    Run *runs;
    Step *steps;
    Life *lives;
    int32_t count, step_count, life_count, program_count, need_count, backward_count, failed;
    int64_t run_room, step_room, life_room, program_room, need_room, head_room, peak_room;
    int32_t *programs, *needs;
    int32_t *backwards;            /* run, start, stop of saved segments, as their backwards come */
    int32_t *last_part, *previous; /* of a segment; [segments]: of the outermost level */
    uint8_t *policies, *keeps, *kept;
    int32_t *leaf_of, *keepers;    /* for each operation, the run that supplies its backward, and its internal tensors */
    int32_t *needed, *wanted, *alive, *read, mark;
    int32_t *made, *known, generation;    /* for each run and value */
    int32_t *last, *born, *next, *head, *peak_values;
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

/* Whether segments cover what they are parts of, in order, between cuts; policies name what they can. */
static int is_plan(State *s) {
    const Graph *g = s->graph;
    const Plan *p = s->plan;
    for (int32_t i = 0; i <= p->segments; i++) s->last_part[i] = -1;
    for (int32_t i = 0; i < p->segments; i++) {
        int64_t around = p->parent[i] < 0 ? p->segments : p->parent[i];
        int32_t before = s->last_part[around];
        int32_t begin = before >= 0 ? p->stop[before] : p->parent[i] < 0 ? 0 : p->start[p->parent[i]];
        if (p->start[i] != begin || p->stop[i] <= begin || p->stop[i] > g->operations || !g->is_cut[p->stop[i]]) return 0;
        s->previous[i] = before;
        s->last_part[around] = i;
    }
    for (int32_t i = 0; i <= p->segments; i++) {
        int64_t stop = i == p->segments ? g->operations : p->stop[i], part = s->last_part[i];
        if (i == p->segments || p->is_recomputed[i] ? part < 0 || p->stop[part] != stop : part >= 0) return 0;
    }
    for (int32_t i = 0; i < p->policies; i++) {
        int32_t v = p->value[i], in = p->segment[i];
        if (v < 0 || v >= g->values) return 0;
        if (in >= 0 && (!p->is_recomputed[in] || g->producers[v] < p->start[in] || g->producers[v] >= p->stop[in])) return 0;
    }
    return 1;
}

static void visit(State *s, int32_t number, int32_t part) {
    const Plan *p = s->plan;
    for (; part >= 0; part = s->previous[part]) {
        if (p->is_recomputed[part]) {
            int32_t child = s->count++;
            s->runs[child] = (Run){.start = p->start[part], .stop = p->stop[part], .parent = number, .segment = part};
            visit(s, child, s->last_part[part]);
        } else {
            int32_t *entry = s->backwards + 3 * s->backward_count++;
            entry[0] = number, entry[1] = p->start[part], entry[2] = p->stop[part];
            for (int32_t t = p->start[part]; t < p->stop[part]; t++) s->leaf_of[t] = number;
        }
    }
}

/* The policies that hold in a run: those of segments around it go before its own, those of all runs before these. */
static void set_policies(State *s, int32_t number, int is_on) {
    const Plan *p = s->plan;
    for (int32_t run = number; run > FORWARD; run = s->runs[run].parent)
        for (int32_t i = 0; i < p->policies; i++)
            if (p->segment[i] == s->runs[run].segment) s->policies[p->value[i]] = is_on ? p->policy[i] : 0;
    for (int32_t i = 0; i < p->policies; i++)
        if (p->segment[i] < 0) s->policies[p->value[i]] = is_on ? p->policy[i] : 0;
}

static int is_remade(const State *s, const Run *run, int32_t v) {
    if (s->policies[v]) return s->policies[v] == REMADE;
    return s->graph->producers[v] >= run->start && s->graph->last_uses[v] < run->stop;
}

static int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }

static int32_t want(State *s, int32_t v, int32_t first) {
    s->wanted[v] = s->mark;
    return least(first, s->graph->producers[v]);
}

static int32_t need(State *s, const Run *run, int32_t v, int32_t first) {
    s->needed[v] = s->mark;
    return s->wanted[v] != s->mark && is_remade(s, run, v) ? want(s, v, first) : first;
}

/* Find what a run must run again, from what is needed backwards; runs inside it come first. */
static int write_program(State *s, int32_t number) {
    const Graph *g = s->graph;
    Run *run = s->runs + number;
    int32_t first = run->start, complete = 0;
    s->mark++;
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
            if (t > g->last_writes[g->reads[i]]) s->needed[g->reads[i]] = s->mark;
    }
    run->program_stop = s->program_count;
    s->needs = room_for(s, s->needs, &s->need_room, s->need_count + g->values, sizeof *s->needs);
    if (s->failed) return NO_MEMORY;
    run->needs = s->need_count;
    for (int32_t v = 0; v < g->values; v++)
        if (s->needed[v] == s->mark && made[v] != s->generation) s->needs[s->need_count++] = v;
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

static void note(State *s, int32_t run, int32_t v, int32_t step) {
    int64_t copy = (int64_t)run * s->graph->values + v;
    s->known[copy] = s->generation;
    s->last[copy] = step;
}

/* For each step, a list of the copies that none behind it makes or needs. */
static int set_last_needs(State *s) {
    const Graph *g = s->graph;
    for (int32_t n = 0; n < s->step_count; n++) {
        const Step *step = s->steps + n;
        int32_t t = step->operation;
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
    for (int32_t v = 0; v < g->values; v++)
        if (g->is_returned[v] && !g->is_output[v] && s->last[v] < g->operations - 1) s->last[v] = (int32_t)g->operations - 1;
    s->head = room_for(s, s->head, &s->head_room, s->step_count, sizeof *s->head);
    if (s->failed) return NO_MEMORY;
    for (int32_t n = 0; n < s->step_count; n++) s->head[n] = -1;
    for (int32_t run = 0; run < s->count; run++)
        for (int32_t v = 0; v < g->values; v++) {
            int64_t copy = (int64_t)run * g->values + v;
            if (s->known[copy] != s->generation) continue;
            s->born[copy] = -1;
            s->next[copy] = s->head[s->last[copy]];
            s->head[s->last[copy]] = (int32_t)copy;
        }
    return FOUND;
}

typedef struct {
    int64_t live, peak;
    int32_t events, peak_event;
} Memory;

static void record(Memory *m, int64_t extra) {
    if (m->live + extra > m->peak) m->peak = m->live + extra, m->peak_event = m->events;
    m->events++;
}

static void drop(State *s, Memory *m, int32_t copy) {
    int32_t v = copy % (int32_t)s->graph->values;
    if (s->born[copy] < 0) return;
    s->lives[s->life_count++] = (Life){v, s->born[copy], m->events};
    s->born[copy] = -1;
    m->live -= s->graph->bytes[v];
}

static void drop_done(State *s, Memory *m, int32_t step) {
    for (int32_t copy = s->head[step]; copy >= 0; copy = s->next[copy])
        if (copy >= s->graph->values || !s->graph->is_output[copy]) drop(s, m, copy);
}

static void take(State *s, Memory *m, int32_t n) {
    const Graph *g = s->graph;
    const Step step = s->steps[n];
    int32_t t = step.operation, taken = g->takes_over[t], first = step.run * (int32_t)g->values;
    const Variant *f = variant(s, t);
    if (step.during == IN_BACKWARD) {
        record(m, f->backward[t]);
        drop_done(s, m, n);
        if (f->late[t]) record(m, f->late[t]);
        m->live -= f->internal[t];
        return;
    }
    for (int32_t i = g->write_at[t]; i < g->write_at[t + 1]; i++)
        if (s->born[first + g->writes[i]] < 0) {
            s->born[first + g->writes[i]] = m->events;
            m->live += g->bytes[g->writes[i]];
        }
    if (taken >= 0 && s->known[first + taken] == s->generation && s->last[first + taken] == n) drop(s, m, first + taken);
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
    s->policies = calloc(v, 1), s->kept = calloc(v, 1);
    s->needed = calloc(v, sizeof(int32_t)), s->wanted = calloc(v, sizeof(int32_t));
    s->failed = !(s->leaf_of && s->keepers && s->alive && s->keeps && s->policies && s->kept && s->needed && s->wanted);
    return s;
}

void ogc_delete(State *s) {
    void *all[] = {s->runs, s->steps, s->lives, s->programs, s->needs, s->backwards, s->last_part, s->previous,
                   s->policies, s->keeps, s->kept, s->leaf_of, s->keepers, s->needed, s->wanted, s->alive,
                   s->made, s->known, s->last, s->born, s->next, s->head, s->peak_values, s};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

/* Room for so many segments, each of which may be a run. */
static void set_room(State *s, int64_t segments) {
    int64_t runs = 2 * (segments + 1), copies = runs * s->graph->values;
    if (segments + 1 <= s->run_room) return;
    int32_t **by_copy[] = {&s->made, &s->known, &s->last, &s->born, &s->next};
    for (size_t i = 0; i < sizeof by_copy / sizeof *by_copy; i++) {
        free(*by_copy[i]);
        *by_copy[i] = calloc((size_t)copies + 1, sizeof(int32_t));
        s->failed |= !*by_copy[i];
    }
    free(s->runs), free(s->backwards), free(s->last_part), free(s->previous);
    s->runs = malloc((size_t)runs * sizeof *s->runs);
    s->backwards = malloc(3 * (size_t)runs * sizeof(int32_t));
    s->last_part = malloc((size_t)runs * sizeof(int32_t)), s->previous = malloc((size_t)runs * sizeof(int32_t));
    s->failed |= !(s->runs && s->backwards && s->last_part && s->previous);
    s->run_room = runs;
}

/* The cost of a plan: FOUND, or why there is none. */
int ogc_replay(State *s, const Plan *plan, Cost *cost) {
    const Graph *g = s->graph;
    s->plan = plan;
    s->count = s->step_count = s->life_count = s->program_count = s->need_count = s->backward_count = 0;
    set_room(s, plan->segments);
    if (s->failed) return NO_MEMORY;
    s->generation++;
    if (!is_plan(s)) return NO_PLAN;
    s->runs[s->count++] = (Run){.stop = (int32_t)g->operations, .parent = -1, .segment = -1, .is_done = 1};
    visit(s, FORWARD, s->last_part[plan->segments]);

    for (int32_t v = 0; v < g->values; v++) s->kept[v] = 0;
    for (int32_t i = 0; i < plan->policies; i++)
        if ((plan->segment[i] < 0 || plan->parent[plan->segment[i]] < 0) && plan->policy[i] == KEPT) s->kept[plan->value[i]] = 1;
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
    s->lives = room_for(s, s->lives, &s->life_room, s->step_count + (int64_t)s->count * g->values, sizeof *s->lives);
    if (s->failed) return NO_MEMORY;

    Memory memory = {0, -1, 0, 0};
    for (int32_t n = 0; n < s->step_count; n++) take(s, &memory, n);
    *cost = (Cost){.peak_bytes = memory.peak > 0 ? memory.peak : 0, .runs = s->count - 1};
    for (int32_t number = 1; number < s->count; number++)
        for (int32_t i = s->runs[number].program; i < s->runs[number].program_stop; i++)
            cost->recomputed_seconds += variant(s, s->programs[i])->repeat_seconds[s->programs[i]];
    for (int32_t t = 0; t < g->operations; t++)
        if (s->leaf_of[t] != FORWARD) cost->seen_tensors += g->saved_tensors[t];
    for (int64_t copy = 0; copy < s->count * g->values; copy++)
        if (s->known[copy] == s->generation && s->born[copy] >= 0)
            s->lives[s->life_count++] = (Life){(int32_t)(copy % g->values), s->born[copy], memory.events};
    s->peak_values = room_for(s, s->peak_values, &s->peak_room, s->life_count, sizeof *s->peak_values);
    if (s->failed) return NO_MEMORY;
    for (int32_t i = 0; i < s->life_count; i++)
        if (s->lives[i].born <= memory.peak_event && memory.peak_event < s->lives[i].gone)
            s->peak_values[cost->alive++] = s->lives[i].value;
    cost->peak_values = s->peak_values;
    return FOUND;
}
