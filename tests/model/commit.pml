/* SPDX-License-Identifier: Apache-2.0
 *
 * The commit protocol as an explicit-state model (Promela, Spin 6.5): every interleaving of ranks, launches, imports,
 * removals, collectors, a snapshot and a power loss, for a handful of saves. README.md says how to read and run it.
 *
 * Attempts: 0     the commit of step 0 that stands in the list from the start
 *           1, 2  first and second save of launch 1, whose entry stands in the list from the start
 *           3     save of launch 2, a restart of the job     5  save of launch 3, the saver of launch 1 opened again
 *           4     an import: one writer, no launch
 * A job has NR ranks. Pack of attempt a, rank r = bit NR*a+r. A process that stops, or wakes late, is one that the
 * scheduler does not pick, so every stall and every death is among the interleavings. A list entry is read or put in
 * one step; the check of an operation and its put are two steps. `if :: d_step {...} fi` is such a step.
 *
 * `code:` behind a label, an inline or a process names the functions that make this transition, each of which has
 * `model:` and the label in a comment above it; "later" where the code has none yet. A test compares both sides.
 *
 * Rules (F_...); without one the model does what one might do instead:
 *   UNDEC   a commit counts only while its attempt is undecided: neither aborted nor committed before
 *   ABORT   `failed` is told only when the list decides so: who gives up appends `abort` first
 *   HIST    who acts for an attempt knows every entry since its launch's or its begin, not only since a snapshot
 *   BASE    a base is named before it is used, and the list is read again after that
 *   SYNC    no act on an entry or file, and no next entry, before it is durable
 *   ENTRY   `remove` names the commit entry, not only the step
 *   LAUNCH  a launch entry aborts the undecided attempts of earlier launches
 *   FRESH   a saver that is opened again is a new launch, not the old one counting anew
 *   BEGIN   `begin` is put before the first pack of the attempt
 *   CAND    the collector lists its candidates and marks before lists and folders
 *   OWN     the collector keeps what belongs to an attempt that was undecided at the first reading
 *   NAMED   the collector keeps what a base named by an undecided attempt reaches
 *   AGAIN   the collector reads the lists again after incoming
 *   SINCE   the second reading reaches every commit that came since the first, removed meanwhile or not
 *   DEL     who may have announced deletes its packs only when the list says `abort`
 *   COVER   every committer checks the cover, not the first rank alone
 *   NAME    a launch's name, hence its packs' names, is made of the run and the id together: an id may serve two runs
 *   MADE    a rank deletes only packs that it has made itself
 *   NONCE   other ranks follow a launch entry only where the heartbeat of a rank 0 shows the nonce that the entry has
 *   LIVES   ... and that rank 0 is seen to live: a heartbeat that was left behind does not do
 *   TAG     an attempt is named by what is saved (step and try), not by how many calls a rank has made
 *   PASSED  who has announced a later attempt of the launch, but not this one, ends this one
 *   TOLD    who comes late to a try that others have ended is told so, and does not take the next one unasked
 *   KEEP    an abort that does not land is kept and put again, before anything else is begun and from time to time
 *   WAITS   an entry that cannot be read for a while is waited out, not taken for damage
 *   SEEN    nobody puts the next number or tells an outcome before every entry was read
 *   BEAT    a rank whose list stays unreadable ends its heartbeat, so that the others give it up
 *   USED    a number that was used stays used: a collected record takes the place of its entry, and names the head
 *   OVER    an attempt that is undecided by a list read anew since its begin is neither committed nor called aborted
 *   ENDS    a committing rank overtaken so puts `abort`; one that finds an abort deletes the manifest that it has put
 *   POS     the head is not above the position in the `begin` of an undecided attempt
 *   MANI    the head is not above the entry that a manifest which is left needs
 *   TOP     the head is not above the end that the list had before the collector listed files and folders
 *   PAST    a list that begins at a head knows the launches before it
 *   ROWS    the mark has what is visible at the head, and stands in for a snapshot that cannot be read
 *
 * Switches: NR, NL (numbers of the list), A1 A2 (saves of launch 1), L2, REOPEN, IMP, CHAIN=n (imports, each of
 * which takes the one before as its base), NOGRACE (the collector deletes at once, and refuses while a writer is
 * alive), REM=n (removals), COL=n (collections of one collector), COLS=n (collectors), SNAP, OTHER (the commit that
 * stands is another run's, saved under the same launch id), TWIN (the last rank runs twice), REUSE (a second job is
 * started under the id of launch 1, whose processes are gone), SKIP=n (calls that a rank leaves out), TRIES (attempt
 * 2 is a second try of the step of attempt 1; with S2=1; who is told that the first failed tries again or leaves the
 * step, and all who are told decide alike), FAULTS=n (puts that fail and do not land), EIO=n (looks at
 * the list that fail), STUCK (the last rank's list stays unreadable), DELAY (a list put in flight), ERR (an
 * announcement in flight), HEAD (a collection also moves the head of the list and deletes entries before it),
 * READER (one that holds the list open), DAMAGE (at last the head's snapshot is lost), HB (heartbeats that seem to stop), CLEAN (a committer deletes its folder), CRASH, WRONG
 * (the last rank announces a wrong box); steps S2..S5, replace flags R1..R5, bases B1..B5 of the attempts. */
#ifndef NR
#define NR 2
#endif
#ifndef NL
#define NL 12
#endif
#ifndef S2
#define S2 2
#endif
#ifndef S3
#define S3 1
#endif
#ifndef S4
#define S4 1
#endif
#ifndef S5
#define S5 2
#endif
#ifndef R1
#define R1 0
#endif
#ifndef R2
#define R2 0
#endif
#ifndef R3
#define R3 0
#endif
#ifndef R4
#define R4 0
#endif
#ifndef R5
#define R5 0
#endif
#ifdef CHAIN
#define B2 1
#define B4 2
#endif
#ifndef B2
#define B2 1
#endif
#ifndef B4
#define B4 0
#endif
#ifndef REM
#define REM 0
#endif
#ifndef COL
#define COL 0
#endif
#ifndef COLS
#define COLS 1
#endif
#ifndef SKIP
#define SKIP 0
#endif
#ifndef FAULTS
#define FAULTS 0
#endif
#ifndef EIO
#define EIO 0
#endif

#define NA 6                  /* attempts */
#define NS 3                  /* steps */
#define BIT(x)   (1 << (x))
#define STEP(a)  ((a) == 0 -> 0 : ((a) == 1 -> 1 : ((a) == 2 -> S2 : ((a) == 3 -> S3 : ((a) == 4 -> S4 : S5)))))
#define REPL(a)  ((a) == 1 -> R1 : ((a) == 2 -> R2 : ((a) == 3 -> R3 : ((a) == 4 -> R4 : ((a) == 5 -> R5 : 0)))))
#define BASE(a)  ((a) == 2 -> B2 : ((a) == 4 -> B4 : 0))        /* the attempt whose commit is named as base */
#ifdef CHAIN
#define OF(a)    0
#define FULL(a)  1
#else
#define OF(a)    ((a) == 3 -> 2 : ((a) == 5 -> 3 : ((a) == 4 -> 0 : 1)))       /* its launch; 0 = none */
#define FULL(a)  ((a) == 4 -> 1 : BIT(NR) - 1)                  /* all its parts */
#endif
#define ATTS(l)  ((l) == 1 -> 6 : ((l) == 2 -> 8 : 32))         /* attempts of a launch */
#define PACK(a, r) BIT(NR * (a) + (r))
#define OWN(a)   ((BIT(NR) - 1) << (NR * (a)))                  /* all its packs */

#define LAUNCH 1              /* kinds of entries; what they name */
#define COMMIT 2              /*   an attempt; and the entry that it replaces */
#define ABORT  3              /*   an attempt */
#define REMOVE 4              /*   a step; and the entry that it removes */
#define SNAPSH 5
#define MK(k, x) (((k) << 4) | (x))

#ifdef F_UNDEC
#define DONE(a)  (vcom & BIT(a))                                /* this attempt's commit stands in the list */
#define VALID(a) (!((vab | vcom) & BIT(a)))
#else
#define DONE(a)  (vl[STEP(a)] && (ent[vl[STEP(a)] - 1] & 15) == (a))    /* ... and is the live one of its step */
#define VALID(a) (!(vab & BIT(a)))
#endif
#ifdef F_COVER
#define COVERS(a, r) (!(wrong & BIT(a)))
#else
#define COVERS(a, r) (r || !(wrong & BIT(a)))
#endif
#define LIVE(a)  (vl[STEP(a)] && (ent[vl[STEP(a)] - 1] & 15) == (a))

byte  ent[NL], rep[NL];       /* the list: kind and subject; 1 + entry replaced or removed (0 = none) */
byte  parts[NA];              /* part.<rank> of an attempt */
byte  begun, based;           /* folders with a `begin`; with a base named: a bit for each attempt */
int   pm[NA];                 /* packs that the parts, hence the manifest, of an attempt name */
int   packs, trash;           /* packs that exist; those with a mark */
byte  pendn, pende, pendr;    /* a list put in flight: lands, or is repeated, at any later time */
byte  latep;                  /* attempts for which the last rank's part is in flight */
int   alive;                   /* packs whose writers have a heartbeat (NOGRACE) */
byte  wrong;                  /* attempts whose parts do not cover */
byte  mf, dm;                 /* manifests linked; durable */
short dl;                     /* list entries that are durable */
byte  ups;                    /* launches whose entry stands */
bit   crashed; byte after = 255;                /* power loss; first process after it */
byte  toldF, toldC, everv, retired, frozen, mixed;      /* history, for the checks only; parts of two saves in one */
byte  skips, faults, eios;    /* calls left out, puts and looks that failed, so far */
byte  plan;                   /* who is told that the first try failed: 1 tries again, 2 goes on without the step */
bit   may = 1;                /* STUCK: it may happen still */
byte  gone;                   /* ranks whose heartbeat has ended */
#ifdef HEAD
byte  named[NL];              /* a collected record names this head; 0: the entry is there */
byte  head;                   /* the highest of them */
byte  pos[NA];                /* position in `begin` */
byte  late_mf;                /* put by a writer that has not ended, for an attempt that was decided already */
byte  dmg = 255;              /* a snapshot that cannot be read any more */
#endif
byte  shown = 1, refused;     /* REUSE: openings whose rank 0 has a heartbeat: 1 left behind, 2 alive; 2 was refused */

hidden byte vN, vab, vcom, vls, vk, vx, vi, vis, vis2, vl[NS];        /* scratch of one step */
#ifdef HEAD
hidden byte vlo, vto = NL, vlast, vend[NA];   /* entries before vlo and from vto on are not known */
#endif

/* ---- reading the list ---- */

/* The attempts of all launches in vls but the one that has just begun, as far as they are undecided. */
#define EARLIER(x) (((vls & 2 && (x) != 1) -> ATTS(1) : 0) | ((vls & 4 && (x) != 2) -> ATTS(2) : 0) \
	| ((vls & 8 && (x) != 3) -> ATTS(3) : 0))

#ifdef HEAD
/* A list that begins at a head takes the steps that are visible there, and the launches before it, for known; of
 * attempts only that those of earlier launches are over, and that those of visible steps are committed. */
inline at_head() {                      /* the code calls it list_start_at_head, list_launches_start */
	if
	:: vlo && vN == vlo ->
#ifndef F_ROWS
		if :: dmg == vlo -> vi = 0; do :: vi < NS -> vl[vi] = 0; vi++ :: else -> break od :: else fi;
#endif
		vcom = 0; vi = 0;
		do
		:: vi < NS -> if :: vl[vi] -> vcom = vcom | BIT(ent[vl[vi] - 1] & 15) :: else fi; vi++
		:: else -> break
		od;
#ifdef F_PAST
		vab = EARLIER(vlast) & ~vcom;
#else
		vab = 0; vls = 0;
#endif
		vi = 0; do :: vi < NA -> vend[vi] = 255; vi++ :: else -> break od
	:: else
	fi
}
#define ENDED(x) vend[x] = vN
#define NEWEST(x) vlast = x
#define HEADED at_head();
#define SEEN_TO vN < vto &&
#else
#define ENDED(x) skip
#define NEWEST(x) skip
#define HEADED
#define SEEN_TO
#endif

/* What a reader knows who starts at entry `from` (a snapshot: live steps only) and reads to the end. */
#define replay(from) replay_but(from, 255)      /* code: commit_list_refresh, list_apply */
inline replay_but(from, bad) {          /* entry `bad` is passed over */
	vN = 0; vab = 0; vcom = 0; vls = 0; vi = 0;
	do :: vi < NS -> vl[vi] = 0; vi++ :: else -> break od;
#ifdef HEAD
	vlast = 0; vi = 0; do :: vi < NA -> vend[vi] = 255; vi++ :: else -> break od;
#endif
	do
	:: SEEN_TO vN < NL && ent[vN] != 0 ->
		HEADED
		vk = (vN != bad -> ent[vN] >> 4 : 0); vx = ent[vN] & 15;
		if
		:: vk == LAUNCH && !(vls & BIT(vx)) -> /* code: apply_launch */
			vls = vls | BIT(vx); NEWEST(vx);
#ifdef F_LAUNCH
			vab = vab | (EARLIER(vx) & ~vcom)
#endif
		:: vk == COMMIT && VALID(vx) && vl[STEP(vx)] == rep[vN] -> /* code: apply_commit */
			if :: vl[STEP(vx)] -> ENDED(ent[vl[STEP(vx)] - 1] & 15) :: else fi;
			vl[STEP(vx)] = vN + 1; vcom = vcom | BIT(vx)
		:: vk == ABORT -> /* code: apply_abort */
			if :: !((vcom | vab) & BIT(vx)) -> vab = vab | BIT(vx); ENDED(vx) :: else fi
		:: vk == REMOVE -> /* code: apply_remove */
#ifdef F_ENTRY
			if
			:: vl[vx] && vl[vx] == rep[vN] -> ENDED(ent[vl[vx] - 1] & 15); vl[vx] = 0
			:: else
			fi
#else
			vl[vx] = 0
#endif
		:: vk == SNAPSH && vN > 0 && vN == from -> /* code: apply_snapshot, list_start */
			vab = 0; vls = 0; vcom = 0; vi = 0;
			do
			:: vi < NS -> if :: vl[vi] -> vcom = vcom | BIT(ent[vl[vi] - 1] & 15) :: else fi; vi++
			:: else -> break
			od
		:: else
		fi; vN++
	:: else -> break
	od; vi = 0
}
/* Number of the newest snapshot, else 0. */
inline newest(from) {                   /* code: start_from_snapshot */
	vi = 0; from = 0;
	do
	:: vi < NL && ent[vi] != 0 -> if :: (ent[vi] >> 4) == SNAPSH -> from = vi :: else fi; vi++
	:: else -> break
	od; vi = 0
}
inline visible(v) {
	v = 0; vi = 0;
	do
	:: vi < NS -> if :: vl[vi] -> v = v | BIT(ent[vl[vi] - 1] & 15) :: else fi; vi++
	:: else -> break
	od; vi = 0
}

/* ---- what must hold after every change of the list, the packs or of what was told ---- */

inline check() {
	newest(vis2); vx = vis2; replay(vx); visible(vis2);
#ifdef HEAD
	vlo = head; replay(0); visible(vx); vis2 = (vx == vis2 -> vis2 : 255); vlo = 0;  /* ... and one from the head */
	assert(!(mf & ~begun & ~late_mf & ~(vab | vcom)));      /* no manifest makes it look as if entries were lost */
#endif
	replay(0); visible(vis);
	assert(vis == vis2);                            /* a reader from the snapshot sees the same steps */
#ifdef HEAD
	assert(head < vN && !named[head] && (!head || (ent[head] >> 4) == SNAPSH));     /* none from the head on */
#endif
	vi = 0;
	do
	:: vi < NA -> assert(!(vis & BIT(vi)) || !(pm[vi] & ~packs)); vi++      /* visible: no pack is missing */
	:: else -> break
	od; vi = 0;
	assert(!(vis & ~mf));                           /* ... nor the manifest */
	assert(!(vis & wrong));                         /* ... and the parts cover */
	assert(!(vis & mixed));                         /* ... and are of one save */
	assert(!(vis & retired));                       /* a removed or replaced commit never comes back */
	everv = everv | vis; retired = everv & ~vis; ups = vls;
	assert(!(vcom & toldF));                        /* `failed` was told: never visible */
	assert(!(toldC & ~vcom));                       /* `committed` was told: stands in the list */
	if                                              /* whom a launch found undecided never commits after it */
	:: vN && (ent[vN - 1] >> 4) == LAUNCH -> frozen = frozen | (EARLIER(ent[vN - 1] & 15) & ~vcom)
	:: else
	fi;
	assert(!(vcom & frozen))
}

/* ---- the list that a process holds: what it has read, from entry `lo` (0, or a head) up to `hi` ---- */

#ifdef HEAD
#define LIST byte lo, hi
#define FILE(n) ((n) < NL && ent[n])
/* Reads on. A collected record leads to the head that it names, or, where that was collected, to the one named there. */
inline refresh() {                      /* the code calls it list_step, list_jump */
	do
	:: FILE(hi) && !named[hi] -> hi++
	:: FILE(hi) && named[hi] -> lo = named[hi]; hi = lo
	:: else -> break
	od;
	know()
}
inline list_open() { lo = 0; hi = 0; refresh() }
inline know() { vlo = lo; vto = hi; replay(0); vlo = 0; vto = NL }
#define LEARN refresh()
#define OPEN list_open()
#define NEWS (n || FILE(hi))
#ifdef F_OVER
#define OVERTAKEN (lo > p0)                     /* the code calls it attempt_overtaken */
#else
#define OVERTAKEN 0
#endif
#define OUTCOME(a) ((vcom & BIT(a)) -> 1 : (OVERTAKEN && !(vab & BIT(a)) -> 3 : ((vab & BIT(a)) -> 2 : 0)))
#define OVER_GO :: rp == 3 -> OVER_RIGHTLY goto fail     /* the code calls it outcome_decide: its abort makes it certain */
/* Only who was slow, or whose attempt is decided, is overtaken. */
#define OVER_RIGHTLY d_step { rp = 0; replay(0); assert(slow || ((vab | vcom) & BIT(a))) };
#else
#define LIST
#define OUTCOME(a) ((vcom & BIT(a)) -> 1 : ((vab & BIT(a)) -> 2 : 0))
#define OVER_GO
#define LEARN replay(0)
#define OPEN replay(0)
#define NEWS (ent[seen] != 0)
#define OVERTAKEN 0
#endif

/* ---- putting an entry ---- */

#ifdef CRASH
inline sync() { dl = BIT(vN) - 1 }      /* code: commit_list_sync */
#else
#define sync() skip                     /* nothing is lost: one state for all that is durable */
#endif
#ifdef F_SYNC
#define SYNC sync()
#else
#define SYNC skip
#endif
/* Put number n: lands, or finds the number taken, or (DELAY) its outcome is unknown and it lands later. */
#ifdef CRASH
#define FSYNC d_step { replay(0); sync() };
#else
#define FSYNC
#endif
#ifdef DELAY
#define LATER(n, e, r, unknown) :: d_step { n < NL && ent[n] == 0 && pendn == 0 -> pendn = n + 1; pende = e; pendr = r }; goto unknown
#else
#define LATER(n, e, r, unknown)
#endif
#if FAULTS
#define LOST(unknown) :: d_step { faults < FAULTS -> faults++ }; goto unknown
#else
#define LOST(unknown)
#endif
#ifdef HEAD
#ifdef F_USED
#define TAKEN(n) FILE(n)
#else
#define TAKEN(n) (FILE(n) && !named[n])
#endif
#define TAKES(n, e, r) ent[n] = e; rep[n] = r; hi = n + 1
#else
#define TAKEN(n) ent[n] != 0
#define TAKES(n, e, r) ent[n] = e; rep[n] = r
#endif
#define PUT(n, e, r, mine, other, unknown) /* code: list_put_number */ \
	if \
	:: n >= NL -> assert(false) \
	:: n < NL && TAKEN(n) -> goto other \
	:: d_step { n < NL && !(TAKEN(n)) -> TAKES(n, e, r); check() }; FSYNC goto mine \
	LATER(n, e, r, unknown) \
	LOST(unknown) \
	fi

/* A look at the list that fails: `again` it is tried, later. */
#if EIO
#ifdef F_WAITS
#define BLIND(again) :: d_step { eios < EIO -> eios++ }; goto again
#else
#define BLIND(again) :: d_step { eios < EIO -> eios++ }; goto end_dead    /* damage: nothing is put or told any more */
#endif
#else
#define BLIND(again)
#endif
#ifdef STUCK
#define STAYS :: may && r == NR - 1 -> goto stuck
#else
#define STAYS
#endif
#if EIO && !defined(F_SEEN)
#define reread(from) replay_but(from, bad)
#define PASS_OVER :: d_step { ent[seen] != 0 && bad == 255 && eios < EIO -> eios++; bad = seen; seen++ }; goto wait
#else
#ifdef HEAD
#define reread(from) refresh()
#else
#define reread(from) replay(from)
#endif
#define PASS_OVER
#endif

#ifdef HEAD
#define SEEN_AT_BEGIN know()
#define LATE_MANIFEST replay(0); late_mf = late_mf | ((vab | vcom) & BIT(a));
#ifdef F_ENDS
#define MANIFEST_GOES mf = mf & ~BIT(a); dm = dm & mf;
#else
#define MANIFEST_GOES
#endif
#define ENDED_LATE late_mf = late_mf & ~BIT(a); p0 = 0; slow = 0;
#define LOOK_FIRST n = 1;                               /* at what it has read already */
#define LOOKED && !n
#define TOLD_SYNC know(); sync()
#else
#define LOOK_FIRST
#define LOOKED
#define TOLD_SYNC replay(0); sync()
#define SEEN_AT_BEGIN replay(0)
#define LATE_MANIFEST
#define MANIFEST_GOES
#define ENDED_LATE
#endif

#ifdef CRASH
#define BEFORE_CRASH provided (!crashed)
#define AFTER_CRASH  provided (!crashed || _pid >= after)
#else
#define BEFORE_CRASH                    /* Spin cannot leave out equivalent orders where `provided` is used */
#define AFTER_CRASH
#endif

/* Which rank 0 is it that launch 1's entry stands for? Its nonce is that of opening 1, which is gone. */
#ifdef F_LIVES
#define SHOWN (shown & 2)
#else
#define SHOWN shown
#endif
#ifdef F_NONCE
#define FOLLOWS (SHOWN & 1)
#else
#define FOLLOWS SHOWN
#endif
#define MIXES (late || (OPENED && (parts[a] & ~BIT(r))))        /* with what others announce of this attempt */
#ifdef REUSE
#define OPENED (l == 1)
#else
#define OPENED 0
#endif

/* ---- one rank: attempt a0 of launch l, then a1 of the same launch, or of launch l1 with the saver opened again ---- */

proctype Rank(byte l; byte r; byte a0; byte a1; byte l1) AFTER_CRASH {
	byte a = a0, n, rp, from, seen, bad = 255; bit reuse, mine, made, late;
#ifdef HEAD
	LIST; byte p0; bit slow;                        /* what it had read when it began; there was more by then */
	if :: d_step { if :: l == 1 -> hi = 2 :: else -> list_open() fi } fi;
#endif

lau:	if                                                  /* code: launch_append, launch_poll, commit_launch_meet */
#ifdef REUSE
	:: l < 2 && FOLLOWS
	:: l < 2 && refused -> goto end_dead                /* waits in vain, and says so */
#else
	:: l < 2                                            /* none, or launch 1, whose entry stands */
#endif
	:: l >= 2 && r == 0 ->                              /* rank 0 appends the entry */
		if :: atomic { d_step { LEARN; n = vN; rp = (vls & BIT(l)); SYNC } } fi;
		if
		:: rp -> goto come                          /* it stands: a put whose outcome was not known */
		:: else -> PUT(n, MK(LAUNCH, l), 0, come, lau, lau)
		fi
	:: l >= 2 && r != 0 && (ups & BIT(l)) ->            /* the others wait for it */
		if :: d_step { OPEN; SYNC } fi
	fi;
come:	skip;                                               /* code: begin_start, attempt_try_take */
#if SKIP
	if                                                  /* the caller leaves this save out, or it fails before it begins */
	:: d_step { skips < SKIP -> skips++ };
#ifdef TRIES                                                /* it calls again, for the first try that it was told nothing of */
	   if
	   :: a == a0 && a1 ->
#ifndef F_TOLD
		d_step { replay(0); if :: (vab | vcom) & BIT(a) -> a = a1; a1 = 0 :: else fi };
#endif
		goto come
	   :: else -> goto next
	   fi
#else
#ifdef F_TAG
	   goto next
#else
	   if :: a == a0 && a1 -> a1 = 0; late = 1 :: else -> goto next fi   /* the next call counts as this one */
#endif
#endif
	:: skip
	fi;
#endif
#ifdef NOGRACE
	d_step { alive = alive | PACK(a, r) };              /* the heartbeat, before anything else */
#endif
#ifdef CHAIN
end_base: everv & BIT(BASE(a));                             /* a chain's saves begin when their base has been seen */
#endif
#ifdef HEAD
	if
	:: atomic { d_step { LEARN; SYNC; p0 = hi; rp = ((vab | vcom) & BIT(a)) } }
	fi;
	if :: rp -> rp = 0; goto next :: else fi;           /* it is decided already */
#endif
begin:	if
	BLIND(begin)
	STAYS
	:: d_step {                                         /* code: begin_meet, base_name */
#ifdef HEAD
		if :: !(begun & BIT(a)) -> pos[a] = p0 :: else fi;
		slow = ent[p0] != 0;
#endif
#ifdef F_BEGIN
		begun = begun | BIT(a);
#endif
		SEEN_AT_BEGIN; reuse = LIVE(BASE(a));
#ifdef F_BASE
		based = based | (reuse -> BIT(a) : 0);
#endif
#ifndef F_HIST
		newest(from);
#endif
		seen = from
	} fi;
	atomic { d_step {                           /* the list again: is the base still there? */
#ifdef F_BASE
		LEARN; reuse = reuse && LIVE(BASE(a))
#else
		based = based | (reuse -> BIT(a) : 0)
#endif

	} };
#if defined(OTHER) || defined(TWIN)
pack:	if                                                  /* code: commit_attempt_pack_open */
	:: d_step { !(packs & PACK(a, r)) -> packs = packs | PACK(a, r); made = 1 }
	:: d_step { (packs & PACK(a, r)) ->                 /* the name is taken */
#if defined(OTHER) && defined(F_MADE)
		assert(made);                               /* nothing goes wrong here: every save has to succeed */
#endif
#ifndef F_MADE
		packs = packs & ~PACK(a, r);                /* a failing save deletes its packs, before anything else */
#endif
		check() }; goto fail
	fi;
#else
	d_step { packs = packs | PACK(a, r) };              /* pack written and sealed */
#endif
#ifndef F_BEGIN
	d_step { begun = begun | BIT(a) };
#endif
part:	if                                                  /* code: commit_attempt_announce */
	:: d_step { !(parts[a] & BIT(r)) -> parts[a] = parts[a] | BIT(r); mine = 1; LOOK_FIRST
		pm[a] = pm[a] | PACK(a, r) | (reuse -> pm[BASE(a)] : 0);
#if defined(REUSE) || SKIP
		mixed = mixed | (MIXES -> BIT(a) : 0);
#endif
#ifdef WRONG
		wrong = wrong | (r == NR - 1 -> BIT(a) : 0)
#endif
		}
	:: (parts[a] & BIT(r)) -> goto fail                 /* the name is taken */
	LOST(fail)
#ifdef ERR
	:: d_step { r == NR - 1 && !(parts[a] & BIT(r)) -> latep = latep | BIT(a); mine = 1;    /* outcome unknown: lands later */
		pm[a] = pm[a] | PACK(a, r) | (reuse -> pm[BASE(a)] : 0) };
#ifndef F_DEL
	   d_step { packs = packs & ~PACK(a, r); check() };
#endif
	   goto fail
	:: d_step { r == NR - 1 -> packs = packs & ~PACK(a, r); check() }; goto fail   /* nothing announced: its packs may go at once */
#endif
	fi;
wait:	if                                                  /* code: attempt_wait */
	BLIND(wait)
	STAYS
	PASS_OVER
	:: atomic { NEWS -> d_step { reread(from); seen = vN; SYNC
		n = 0; rp = OUTCOME(a) } };
	   if :: rp == 1 -> goto yes :: rp == 2 -> goto no OVER_GO :: else -> rp = 0; goto wait fi
#ifdef HB
	:: parts[a] != FULL(a) -> goto fail                 /* somebody's heartbeat seems to have stopped, or it is later than may be */
#endif
#if SKIP || defined(STUCK)
	:: FULL(a) & ~parts[a] & gone -> goto fail          /* a heartbeat has ended: its saver was closed, or gave up */
#endif
#if SKIP && defined(F_PASSED)
	:: a == 1 && (parts[2] & ~parts[1]) -> goto fail    /* code: passed_end_this, passed_end_behind */
#endif
	:: parts[a] == FULL(a) LOOKED -> goto com                  /* any rank takes over */
	fi;
com:	if                                                  /* code: commit_manifest */
	:: d_step { (!(pm[a] & ~packs) && COVERS(a, r)) -> LATE_MANIFEST mf = mf | BIT(a);
#ifdef F_SYNC
		dm = dm | BIT(a)
#endif
		};
#ifdef CRASH
	   if :: !(dm & BIT(a)) && r == 0 -> d_step { dm = dm | BIT(a) }    /* its maker's fsync; who found it there goes on */
	      :: else fi;
#endif
	   skip
	:: else -> goto fail                                /* a pack is gone, or the boxes do not cover */
	fi;
chk:	if
	BLIND(chk)
	:: atomic { d_step {                        /* code: commit_list_put, commit_check */
		reread(from); n = vN; rp = 250;
		if
		:: DONE(a) -> rp = 251
		:: !DONE(a) && OVERTAKEN -> rp = 253
		:: !DONE(a) && !OVERTAKEN && !VALID(a) -> rp = 252
		:: else -> if :: vl[STEP(a)] == 0 || REPL(a) -> rp = vl[STEP(a)] :: else fi
		fi;
		SYNC
	} } fi;
	if
	:: rp == 251 -> goto yes
	:: rp == 252 -> goto no
#ifdef HEAD
#ifdef F_ENDS
	:: rp == 253 -> OVER_RIGHTLY goto fail              /* by an abort the list accounts for the manifest again */
#else
	:: rp == 253 -> OVER_RIGHTLY goto next
#endif
#endif
	:: rp == 250 -> goto fail                           /* the step is taken */
	:: else
	fi;
	PUT(n, MK(COMMIT, a), rp, wait, chk, open);
open:	if                                                  /* code: commit_settle */
	:: goto fail                                        /* the put's outcome is open: `abort`, or the commit, comes first */
	:: goto wait
	fi;
fail:	skip;                                               /* code: commit_list_abort, commit_launch_aborts_put, abort_check, give_up_put, commit_attempt_stop */
#ifndef F_ABORT
	goto no;
#else
	if
	BLIND(fail)
	:: atomic { d_step {
		reread(from); n = vN; rp = ((vcom & BIT(a)) -> 1 : ((vab & BIT(a)) -> 2 : 0));
		SYNC
	} } fi;
	if :: rp == 1 -> goto yes :: rp == 2 -> goto no :: else fi;
	PUT(n, MK(ABORT, a), 0, fail, fail, kept);
kept:	skip;                                               /* code: commit_launch_abort_keep */
#ifdef F_KEEP
	goto fail;
#else
	goto next;                                          /* forgotten; the caller is told that the save is undecided */
#endif
#endif
no:	if :: d_step { n = 0; rp = 0; seen = 0; toldF = toldF | (OVERTAKEN -> 0 : BIT(a)); MANIFEST_GOES check() } fi;    /* code: commit_attempt_abort, attempt_outcome_known */
#ifdef ERR
	d_step { packs = packs & ~PACK(a, r); check() };
#endif
	goto next;
yes:
#ifdef TWIN
	if :: !mine -> goto next :: else fi;                /* another process of this rank did it: what is told is left open */
#endif
	if :: d_step {                                      /* code: attempt_outcome_known */
		assert(mine);                                   /* what was committed is what this call announced */
		n = 0; rp = 0; seen = 0; TOLD_SYNC; toldC = toldC | BIT(a); check() } fi;
#ifdef CLEAN
	if :: d_step { begun = begun & ~BIT(a); based = based & ~BIT(a); parts[a] = 0 } :: skip fi;
#endif
next:	if :: d_step { ENDED_LATE from = 0; reuse = 0; mine = 0; made = 0; late = 0 } fi;
#ifdef TRIES
	if
	:: a == a0 && a1 && (toldF & BIT(a)) ->             /* the trainer: again, or on without this step */
		atomic { if :: plan == 0 -> plan = 1 :: plan == 0 -> plan = 2 :: plan -> skip fi };
		if :: plan == 2 -> goto end_dead :: else fi /* it lives, and saves no more */
	:: else
	fi;
#endif
#ifdef NOGRACE
	d_step { alive = alive & ~PACK(a, r) };
#endif
	if
	:: a == a0 && a1 -> a = a1;
		if
		:: l1 ->                                    /* closed, which drains, and opened again */
#ifdef F_FRESH
			l = l1; l1 = 0; goto lau
#else
			a = a0; a0 = 0; a1 = 0; l1 = 0; goto come
#endif
		:: else -> goto come
		fi
	:: else
	fi;
#if SKIP
	d_step { gone = gone | BIT(r) };                    /* closed: the heartbeat ends */
#endif
	goto end_dead;
#ifdef STUCK
stuck:	skip;                                               /* code: commit_launch_tend */
#ifdef F_BEAT
	d_step { gone = gone | BIT(r) };
#endif
#endif
end_dead: skip
}

#ifdef STUCK
proctype Calm() { may = 0 }                             /* or never: else nobody's waiting for ever would be seen */
#endif

#ifdef REUSE
/* A job is started under the id of launch 1, whose processes are gone: its rank 0 shows its own nonce, and refuses. */
proctype Again() {
	d_step { shown = shown | 2 };
	if :: d_step { replay(0); assert(vls & 2); shown = shown & ~2; refused = 1 } fi         /* code: launch_refuse */
}
#endif

/* `vckpt rm` of any visible step, REM times; of a chain's steps in order. */
proctype Remover() BEFORE_CRASH {
	byte i, s, n, rp, was;
#ifdef HEAD
	LIST;
#endif
	do
	:: i < REM -> i++;
#ifdef HEAD
		d_step { list_open() };
#endif
#ifdef CHAIN
		s = i - 1; was = 0;
#else
		if :: s = 0 :: s = 1 :: s = 2 fi; was = 0;
#endif
rm:		if :: atomic { d_step { LEARN; n = vN; rp = vl[s];      /* code: remove_seen, remove_allowed */
			if :: was == 0 -> was = rp :: else fi;
			sync()
		} } fi;
		if
		:: rp == 0 -> skip
#ifdef F_ENTRY
		:: rp && rp != was -> skip
		:: rp && rp == was ->
#else
		:: rp ->
#endif
			assert(rp == was);                     /* only what was there when it was asked goes */
			PUT(n, MK(REMOVE, s), rp, more, rm, more)
		fi;
more:		if :: d_step { n = 0; rp = 0; was = 0; s = 0 } fi
	:: else -> break
	od
}

/* ---- the collector ---- */

/* Adds to `reach` the packs of the attempts in `set`. */
#define REACH(set) x = 0; do :: x < NA -> if :: (set) & BIT(x) -> reach = reach | pm[x] :: else fi; x++ :: else -> break od; x = 0

#ifdef NOGRACE
#define MARKED packs
#else
#define MARKED trash
#endif

#ifdef HEAD
#define LIST_MANIFESTS candm = mf
#define REACHES(set) reachm = reachm | (set)
#ifdef F_TOP
#define TOP upto = hi
#else
#define TOP upto = NL
#endif
#define TOP_HI tophi = hi
/* The newest snapshot that the head may be. */
#define HEADS \
	know(); h = 0; vx = (upto < hi -> upto : hi); vi = 0; \
	do \
	:: vi < NA -> if :: HOLDS(vi) -> vx = pos[vi] :: else fi; \
		if :: NEEDS(vi) -> vx = vend[vi] :: else fi; vi++ \
	:: else -> break \
	od; \
	vi = lo + 1; \
	do \
	:: vi < hi && vi <= vx -> if :: (ent[vi] >> 4) == SNAPSH -> h = vi :: else fi; vi++ \
	:: else -> break \
	od; upto = 0; tophi = 0; candm = 0; reachm = 0;
#ifdef F_POS
#define HOLDS(x) ((fold & ~n & BIT(x)) && pos[x] < vx)
#else
#define HOLDS(x) false
#endif
#ifdef F_MANI
#define NEEDS(x) ((candm & mf & BIT(x)) && vend[x] < vx)
#else
#define NEEDS(x) false
#endif
/* Of the entries before the head launches stay. The first one is replaced again, last. */
#define GOES(x) ((ent[x] >> 4) != LAUNCH && !named[x])
#define REPLACED(x) named[x] = h; head = (h > head -> h : head)
#define HEAD_MOVES \
	if \
	:: h -> x = h; \
		do \
		:: x && GOES(x - 1) -> d_step { x--; REPLACED(x); check() } \
		:: x && !(GOES(x - 1)) -> x-- \
		:: x == 0 -> break \
		od; \
		do :: x < h && !named[x] -> x++ :: else -> break od; skip; \
		d_step { if :: x < h -> REPLACED(x) :: else fi; x = 0; h = 0; check() } \
	:: else \
	fi;
#else
#define LIST_MANIFESTS
#define REACHES(set)
#define TOP_HI skip
#define HEADS
#endif

proctype Collector() BEFORE_CRASH {
	byte i, n, dec, old_com, fold, fbased, x; int reach, old, cand;
#ifdef HEAD
	LIST; byte upto, tophi, h, candm, reachm;
#endif
	do
	:: i < COL -> i++;
#ifdef HEAD
		d_step { list_open(); TOP };
#endif
#ifdef HB
dead:		if :: atomic { d_step { LEARN; n = vN; dec = vab | vcom; x = 0; sync() } } fi;        /* code: gc_abort_dead */
		if                                              /* an undecided attempt's heartbeats seem to have stopped */
		:: d_step { (begun & ~dec & 2)  -> x = 1 }
		:: d_step { (begun & ~dec & 4)  -> x = 2 }
		:: d_step { (begun & ~dec & 8)  -> x = 3 }
		:: d_step { (begun & ~dec & 16) -> x = 4 }
		:: d_step { (begun & ~dec & 32) -> x = 5 }
		:: skip
		fi;
		if :: x -> PUT(n, MK(ABORT, x), 0, dead, dead, dead) :: else fi;        /* code: abort_folder */
#endif
#ifdef F_CAND
cands:		if :: d_step { cand = packs; old = MARKED; LIST_MANIFESTS } fi;  /* code: gc_read */
#endif
#ifdef NOGRACE
none:		if :: alive -> goto busy :: else fi;            /* code: gc_writers_none */
#endif
top:		if :: atomic { d_step {                 /* code: gc_read, gc_lists_read */
			LEARN; dec = vab | vcom; old_com = vcom; visible(vis); reach = 0; REACH(vis); TOP_HI; sync();
			REACHES(vis)
		} } fi;
inc:		if :: d_step { fold = begun; fbased = based } fi;       /* code: commit_folders_read */
again:		if :: atomic { d_step {                 /* code: gc_read, gc_reach_commits, gc_reach_bases */
#ifdef F_AGAIN
			LEARN; visible(vis);
#ifdef F_SINCE
			vis = vis | (vcom & ~old_com);
#endif
			REACH(vis); sync(); REACHES(vis);
			n = vab | vcom;                         /* decided by now */
#else
			n = dec;
#endif
			do
			:: x < NA ->
#ifdef F_NAMED
				if :: (fbased & BIT(x)) && !(n & BIT(x)) -> reach = reach | pm[BASE(x)]; REACHES(BIT(BASE(x))) :: else fi;
#endif
#ifdef F_OWN
				if :: !(dec & BIT(x)) && ((n | fold) & BIT(x)) -> reach = reach | OWN(x) :: else fi;
#endif
				x++
			:: else -> break
			od; x = 0;
#ifndef F_CAND
			cand = packs; old = MARKED; LIST_MANIFESTS
#endif

		} } fi;
#ifdef HEAD
		if :: lo > tophi -> goto busy :: else fi;         /* the code calls it list_check */
#endif
folders:	if :: d_step {                                  /* code: sweep_folder */
			begun = begun & ~(fold & n); based = based & ~(fold & n);       /* of decided attempts */
			do :: x < NA -> if :: fold & n & BIT(x) -> parts[x] = 0 :: else fi; x++ :: else -> break od; x = 0
		} fi;
mark:		skip;
#ifndef NOGRACE
		d_step { trash = (trash & ~(cand & reach)) | (cand & ~reach) }; /* code: sweep_free, sweep_keep */
#endif
#ifdef HEAD
		if                                              /* manifests that nothing needs: deleted, or marked for another time */
		:: d_step { mf = mf & ~(candm & ~reachm & (n | ~fold)); dm = dm & mf; check() }
		:: skip
		fi;
#endif
sweep:		d_step { packs = packs & ~(cand & old & ~reach); trash = trash & packs;         /* code: sweep_delete */
			HEADS reach = 0; old = 0; cand = 0; dec = 0; fold = 0; fbased = 0; old_com = 0; n = 0; check() };
#ifdef HEAD
		HEAD_MOVES
#endif
busy:		skip
	:: else -> break
	od
}

/* ---- the world ---- */

proctype Net() {                                        /* puts in flight land, any number of times */
end:	do
	:: d_step { pendn && ent[pendn - 1] == 0 -> ent[pendn - 1] = pende; rep[pendn - 1] = pendr; check() }
	:: d_step { (latep & 2) && !(parts[1] & BIT(NR - 1)) -> parts[1] = parts[1] | BIT(NR - 1) }
	:: d_step { (latep & 4) && !(parts[2] & BIT(NR - 1)) -> parts[2] = parts[2] | BIT(NR - 1) }
	od
}
proctype Snapshot() {                                   /* stands for the 64th entry: once, anywhere */
	byte n;
#ifdef HEAD
	byte i; LIST;
	do
	:: i < SNAP -> i++; n = 0; d_step { list_open() };
#else
	skip;
#endif
sn:	if :: atomic { d_step { LEARN; n = vN } } fi;  /* code: put_snapshot */
	PUT(n, MK(SNAPSH, 0), 0, done, sn, done);
done:	skip
#ifdef HEAD
	:: else -> break
	od
#endif
}
#ifdef READER
/* Holds the list open: reads it entry by entry, from the head or the newest snapshot, and then on. */
proctype Reader() BEFORE_CRASH {
	bit e; LIST;
	if :: d_step { lo = 0; hi = 0; e = 1 } :: d_step { newest(lo); hi = lo; e = 1 } fi;
	do
	:: d_step { FILE(hi) && !named[hi] -> hi++; e = 1 }
	:: d_step { FILE(hi) && named[hi] -> lo = named[hi]; hi = lo; e = 1 }
	:: d_step { e && !(FILE(hi)) ->
		e = 0; know(); visible(vis2); vto = hi; replay(0); vto = NL; visible(vis);
		assert(vis == vis2) }                       /* what it shows is what was visible at that entry */
	:: !e && !(FILE(hi)) -> break
	od;
done:	skip
}
#endif
#ifdef DAMAGE
proctype Damage() {                                     /* at last the head's snapshot cannot be read any more */
	if :: timeout -> d_step { dmg = (head -> head : 255); check() } fi
}
#endif
/* Power loss: of what was not synced, each entry and manifest by itself is kept or lost; launch 2 starts after it. */
proctype Crash() {
	byte i;
	d_step { crashed = 1; pendn = 0; latep = 0 };
	do
	:: i < NL && ent[i] != 0 && !(dl & BIT(i)) -> if :: ent[i] = 0; rep[i] = 0 :: skip fi; i++
	:: i < NL && ent[i] != 0 && (dl & BIT(i)) -> i++
	:: i < NL && ent[i] == 0 -> i++
	:: i == NL -> break
	od;
	i = 1;
	do
	:: i < NA && (mf & BIT(i)) && !(dm & BIT(i)) -> if :: mf = mf & ~BIT(i) :: skip fi; i++
	:: i < NA && (!(mf & BIT(i)) || (dm & BIT(i))) -> i++
	:: i == NA -> break
	od; i = 0;
	d_step { replay(0); visible(vis); everv = vis; retired = 0; frozen = 0; check() };
	after = run Rank(2, 0, 3, 0, 0); run Rank(2, 1, 3, 0, 0)
}

#if NR > 2
#define RANKS(l, a0, a1, l1) run Rank(l, 0, a0, a1, l1); run Rank(l, 1, a0, a1, l1); run Rank(l, 2, a0, a1, l1)
#else
#if NR > 1
#define RANKS(l, a0, a1, l1) run Rank(l, 0, a0, a1, l1); run Rank(l, 1, a0, a1, l1)
#else
#define RANKS(l, a0, a1, l1) run Rank(l, 0, a0, a1, l1)
#endif
#endif

init {
	d_step { ent[0] = MK(COMMIT, 0); ent[1] = MK(LAUNCH, 1); dl = 3; pm[0] = 1; packs = 1; mf = 1; dm = 1; everv = 1;
		ups = 2;
#if defined(OTHER) && !defined(F_NAME)
		pm[0] = PACK(1, 0); packs = PACK(1, 0);         /* the first save of that id in the other run */
#endif
#ifdef REUSE
		begun = 2; parts[1] = BIT(0); pm[1] = PACK(1, 0); packs = packs | PACK(1, 0);   /* rank 1 had not come */
#endif
		};
	atomic {
#ifdef DAMAGE
		run Damage();
#endif
#ifdef STUCK
		run Calm();
#endif
#ifdef REUSE
		run Again(); run Rank(1, 1, 1, 0, 0);
#endif
#ifdef TWIN
		run Rank(1, NR - 1, 1, 0, 0);
#endif
#ifdef REOPEN
		RANKS(1, 1, 5, 3);
#endif
#ifdef A2
		RANKS(1, 1, 2, 0);
#endif
#ifdef A1
		RANKS(1, 1, 0, 0);
#endif
#ifdef CHAIN
		run Rank(0, 0, 1, 0, 0); run Rank(0, 0, 2, 0, 0);
#if CHAIN > 2
		run Rank(0, 0, 4, 0, 0);
#endif
#endif
#ifdef CRASH
		run Crash();
#else
#ifdef L2
		RANKS(2, 3, 0, 0);
#endif
#endif
#ifdef IMP
		run Rank(0, 0, 4, 0, 0);
#endif
#if REM > 0
		run Remover();
#endif
#if COL > 0
		run Collector();
#if COLS > 1
		run Collector();
#endif
#endif
#ifdef SNAP
		run Snapshot();
#endif
#ifdef READER
		run Reader();
#endif
#if defined(DELAY) || defined(ERR)
		run Net();
#endif
	}
}
