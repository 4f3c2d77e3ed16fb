/* A page's life (shm/page_word.hpp) under group writes of two ranks, with leases, eviction, copies in flight, deadlines
 * that pass at any step, the death of a rank at any step, and the death of the daemon between any two of its stores,
 * recovery included.
 *
 * One pool slot and two page entries: every new page evicts the old one and reuses its slot, the dangerous case.
 *
 * Properties
 *   no page in two places   no slot belongs to two ready pages, or to a page and the free list; no key has two pages;
 *                           no copy lands in a slot that has been given back (assertions, and Watch at every step)
 *   a lease holds           a page that a rank's lease pins is not evicted, and no lease outlives its rank
 *   every operation ends    each surviving rank gets an answer to each of its OPERATIONS writes, whoever dies when
 *                           (no invalid end state)
 *
 * Steps that change only what recovery makes anew are taken as one where nobody else could tell.
 *
 * -D names a fault that the check must find: see run.sh.
 */

#define PAGES 2
#define RANKS 2
#define KEYS 2
#define OPERATIONS 2
#define NONE 9

#define FREE 0
#define RESERVED 1
#define FILLING 2
#define READY 3
#define EVICTING 4
#define ABORTING 5

/* The region: survives the daemon. */
byte state[PAGES];
byte key[PAGES] = NONE;
bool holds_slot[PAGES]; /* the entry's pool_offset names the slot */

/* The daemon's own, rebuilt by recovery. */
bool slot_free = true;
byte index_of[KEYS] = NONE;
byte shards[PAGES]; /* ranks whose shard is complete */
bool broken;        /* the group lost a rank */

/* Copies, by rank: the page they fill while they run, and whether their end was reported. */
byte copy_page[RANKS] = NONE;
bool landed[RANKS];

/* Leases, by rank: the ready page that is pinned. */
byte lease[RANKS] = NONE;

/* The ranks' rings, reduced to counts. */
byte posted[RANKS], ended[RANKS];
bool rank_dead[RANKS], rank_gone[RANKS]; /* gone: its death was noticed */
bool daemon_dead;

#define SET(p, to) state[p] = to

proctype Rank(byte me) {
  {
    do
    :: posted[me] < OPERATIONS ->
       posted[me]++;
       ended[me] == posted[me] || daemon_dead;
       if
       :: daemon_dead -> break /* libhicache ends what is open with daemon_lost */
       :: else
       fi
    :: posted[me] == OPERATIONS -> break
    od
  } unless {
    rank_dead[me]
  }
}

/* Kills at most one rank and, or, the daemon, at any moment. */
proctype Killer() {
  if
  :: true
  :: rank_dead[0] = true
  :: rank_dead[1] = true
  fi;
  if
  :: true
  :: daemon_dead = true
  fi
}

/* A copy ends when it likes. Its bytes must land where a page still waits for them. */
proctype Copies() {
end:
  do
  :: atomic {
       copy_page[0] != NONE && !landed[0] && !daemon_dead ->
       assert(holds_slot[copy_page[0]] && !slot_free);
       assert(state[copy_page[0]] == FILLING || state[copy_page[0]] == ABORTING);
       landed[0] = true
     }
  :: atomic {
       copy_page[1] != NONE && !landed[1] && !daemon_dead ->
       assert(holds_slot[copy_page[1]] && !slot_free);
       assert(state[copy_page[1]] == FILLING || state[copy_page[1]] == ABORTING);
       landed[1] = true
     }
  od
}

inline give_slot_back(p) {
  assert(!slot_free);
  holds_slot[p] = false;
  slot_free = true
}

#ifdef EVICT_PINNED
#define PINNED(p) false
#else
#define PINNED(p) (lease[0] == p || lease[1] == p)
#endif

inline evict(p) {
  assert(state[p] == READY);
  assert(lease[0] != p && lease[1] != p);
#ifdef SLOT_BEFORE_STATE
  slot_free = true; /* the state would follow when the new page is complete */
  index_of[key[p]] = NONE
#else
  SET(p, EVICTING);
  index_of[key[p]] = NONE;
  give_slot_back(p);
  SET(p, FREE)
#endif
}

inline allocate(p, k) {
  assert(slot_free && state[p] == FREE);
  slot_free = false;
  holds_slot[p] = true;
  key[p] = k;
  shards[p] = 0;
  SET(p, RESERVED);
  assert(index_of[k] == NONE);
  index_of[k] = p
}

inline abort_page(p) {
  SET(p, ABORTING);
  index_of[key[p]] = NONE
}

inline free_aborted(p) {
  give_slot_back(p);
  SET(p, FREE)
}

#ifdef FREE_BEFORE_LANDED
#define COPIES_OF(p) false
#else
#define COPIES_OF(p) (copy_page[0] == p || copy_page[1] == p)
#endif

/* A rank's entry that was not read yet. */
#define WANTS(r) (!rank_gone[r] && posted[r] > accepted[r])
#define DONE(r) (rank_gone[r] || ended[r] == OPERATIONS)
#define DEATH(r) (rank_dead[r] && !rank_gone[r])

/* Answers to every rank that takes part in the open operation. */
inline end_operation() {
  atomic {
    open = false;
    if
    :: accepted[0] == op && ended[0] < op -> ended[0] = op
    :: else
    fi;
    if
    :: accepted[1] == op && ended[1] < op -> ended[1] = op
    :: else
    fi
  }
}

/* The first rank's entry decides for the group: is the page there, and if not, where will it be? */
inline decide() {
  atomic {
    op = posted[r];
    open = true;
    page = NONE
  };
  if
  :: index_of[op % KEYS] != NONE -> lease[r] = index_of[op % KEYS] /* there already: pinned */
  :: else ->
     page = (state[0] == FREE -> 0 : 1);
     if
     :: !slot_free && state[1 - page] == READY && !PINNED(1 - page) -> evict(1 - page)
     :: else
     fi;
     if
     :: slot_free -> allocate(page, op % KEYS); SET(page, FILLING)
     :: else -> page = NONE /* no room: dropped */
     fi
  fi
}

inline release() {
  assert(state[lease[r]] == READY);
  lease[r] = NONE
}

/* A rank lets go of its last lease before it asks for more. */
inline take_entry() {
  atomic {
    if
    :: lease[r] != NONE -> release()
    :: else
    fi;
    accepted[r] = posted[r]
  };
  if
  :: broken -> ended[r] = posted[r] /* peer_lost */
  :: !broken && (posted[r] < op || (posted[r] == op && !open)) -> ended[r] = posted[r] /* over before it came */
  :: !broken && posted[r] == op && open -> copy_page[r] = page
  :: !broken && posted[r] > op ->
     decide();
     if
     :: page == NONE -> end_operation()
     :: else -> copy_page[r] = page
     fi
  fi
}

inline take_landing() {
  atomic {
    landing = copy_page[r];
    shards[landing] = shards[landing] | (1 << r);
    copy_page[r] = NONE;
    landed[r] = false
  };
  if
  :: state[landing] == FILLING && shards[landing] == 3 ->
     SET(landing, READY);
     /* Pinned by the leases of those who wrote it, until they let go. */
     lease[r] = landing;
#ifdef SLOT_BEFORE_STATE
     if
     :: state[1 - landing] == READY -> holds_slot[1 - landing] = false; SET(1 - landing, FREE)
     :: else
     fi;
#endif
     end_operation()
  :: state[landing] == ABORTING && !COPIES_OF(landing) && holds_slot[landing] -> free_aborted(landing)
  :: else
  fi
}

/* The open operation's time is up: it ends for everybody, its copies go on. */
inline take_deadline() {
  abort_page(page);
  if
  :: !COPIES_OF(page) -> free_aborted(page)
  :: else
  fi;
  end_operation()
}

/* A dead rank: fence it, break its group, end what can't complete. */
inline take_death() {
  rank_gone[r] = true;
  broken = true;
#ifndef LEASE_OF_THE_DEAD
  lease[r] = NONE;
#endif
  if
  :: open ->
     abort_page(page);
     if
     :: !COPIES_OF(page) -> free_aborted(page)
     :: else
     fi;
#ifdef FORGET_SURVIVORS
     open = false
#else
     end_operation()
#endif
  :: else
  fi
}

proctype Coordinator() {
  byte r, op, page = NONE, landing;
  byte accepted[RANKS];
  bool open;
  bool expired; /* one deadline passes at most: more only make the search longer */
  {
    do
    :: WANTS(0) -> r = 0; take_entry()
    :: WANTS(1) -> r = 1; take_entry()
    :: landed[0] -> r = 0; take_landing()
    :: landed[1] -> r = 1; take_landing()
    :: DEATH(0) -> r = 0; take_death()
    :: DEATH(1) -> r = 1; take_death()
    :: open && !expired -> expired = true; take_deadline()
    :: ended[0] == OPERATIONS && lease[0] != NONE && !rank_gone[0] -> r = 0; release()
    :: ended[1] == OPERATIONS && lease[1] != NONE && !rank_gone[1] -> r = 1; release()
    :: DONE(0) && DONE(1) && copy_page[0] == NONE && copy_page[1] == NONE && lease[0] == NONE && lease[1] == NONE -> break
    od
  } unless {
    daemon_dead
  };
  run Recovery(daemon_dead)
}

/* What the next daemon does with the page table; it may die half-way, once, and be followed by another. Its copies are
 * gone with the dead one. */
proctype Recovery(bool may_die) {
  byte p;
again:
  copy_page[0] = NONE;
  copy_page[1] = NONE;
  lease[0] = NONE;
  lease[1] = NONE;
  index_of[0] = NONE;
  index_of[1] = NONE;
  slot_free = true;
  p = 0;
  do
  :: p < PAGES ->
     if
     :: state[p] == READY ->
        assert(holds_slot[p]);
        assert(slot_free); /* else two pages have this slot */
        assert(index_of[key[p]] == NONE);
        slot_free = false;
        index_of[key[p]] = p
     :: else -> holds_slot[p] = false; SET(p, FREE)
     fi;
     p++;
     if
     :: may_die -> may_die = false; goto again
     :: true
     fi
  :: else -> break
  od;
  assert(slot_free == !((state[0] == READY) || (state[1] == READY)))
}

/* At every step: the ready pages have slots of their own, and none of them is on the free list. */
proctype Watch() {
  assert(!(state[0] == READY && state[1] == READY && holds_slot[0] && holds_slot[1]))
}

init {
  atomic {
    run Rank(0);
    run Rank(1);
    run Copies();
    run Killer();
    run Coordinator();
    run Watch()
  }
}
