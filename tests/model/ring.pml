/* The two rings between a client and the daemon, and the sleep/kick protocol around them (SYNC ring-publish,
 * SYNC ring-free, SYNC park), with the memory of a real machine: every process has a store buffer that drains when it
 * likes, so a store may become visible after a later load. A fence waits until the own buffer is empty.
 *
 * Parks have no time-out here: a wake-up that is lost shows as a process that sleeps for ever (invalid end state).
 *
 * Properties
 *   no lost wake-up        no invalid end state: nobody sleeps while there is work for it
 *   every operation ends   the client reads exactly one completion for each of its OPERATIONS submissions
 *   entries arrive whole   what is read from a slot is what was put there for this entry (assertions on payloads)
 *
 * Positions are counted modulo 4 over rings of 2: the counters wrap twice in a run.
 * -D names a fault that the check must find: see run.sh.
 */

#define OPERATIONS 5
#define WRAP 4  /* the counters are this wide */
#define SLOTS 2 /* entries of either ring */
#define BUFFER 6

/* Shared words. Each has one writer. */
#define SQ_SEQUENCE 0 /* .. 1: sequence of each submission slot, client */
#define SQ_PAYLOAD 2  /* .. 3: client */
#define SQ_HEAD 4     /* daemon */
#define CQ_SEQUENCE 5 /* .. 6: daemon */
#define CQ_PAYLOAD 7  /* .. 8: daemon */
#define CQ_HEAD 9     /* client */
#define DAEMON_SLEEPING 10
#define CLIENT_WAITING 11
#define CQ_WAKE 12 /* futex word, daemon */
#define WORDS 13

#define CLIENT 0
#define DAEMON 1

byte mem[WORDS];
chan buffer[2] = [BUFFER] of { byte, byte };

bool event;        /* the coordinator's eventfd as its edge-triggered epoll sees it */
bool client_sleeps; /* in futex_wait */

inline store(who, word, value) { buffer[who] ! word, value }
inline fence(who) { empty(buffer[who]) }

proctype Drain(byte who) {
  byte word, value;
end:
  do
  :: atomic { buffer[who] ? word, value -> mem[word] = value }
  od
}

/* Payload of the n-th entry: anything that differs between an entry and the one before it in its slot. */
#define PAYLOAD(n) ((n) + 1)

inline publish(who, sequence_at, payload_at, n) {
#ifdef SEQUENCE_BEFORE_PAYLOAD
  store(who, sequence_at + ((n) % SLOTS), ((n) + 1) % WRAP);
  store(who, payload_at + ((n) % SLOTS), PAYLOAD(n))
#else
  store(who, payload_at + ((n) % SLOTS), PAYLOAD(n));
  store(who, sequence_at + ((n) % SLOTS), ((n) + 1) % WRAP)
#endif
}
#define READY(sequence_at, n) (mem[sequence_at + ((n) % SLOTS)] == ((n) + 1) % WRAP)

/* write() on the eventfd: a system call, and what was stored before it is there for whoever it wakes. */
inline kick_daemon() {
#ifndef NO_SUBMITTER_FENCE
  fence(CLIENT);
#endif
  if
  :: mem[DAEMON_SLEEPING] == 1 -> fence(CLIENT); event = true
  :: else
  fi
}

active proctype Client() {
  byte posted = 0, read = 0, kicks;
  run Drain(CLIENT);
  do
  :: read == OPERATIONS -> break
  :: read < OPERATIONS && READY(CQ_SEQUENCE, read) ->
     assert(mem[CQ_PAYLOAD + (read % SLOTS)] == PAYLOAD(read));
     read++;
     store(CLIENT, CQ_HEAD, read % WRAP);
#ifndef NO_KICK_AFTER_READ
     /* The daemon may be asleep because its completions had no room. */
     if
     :: mem[SQ_HEAD] != posted % WRAP -> kick_daemon()
     :: else
     fi
#endif
  :: posted < OPERATIONS && posted - read < SLOTS && (posted + WRAP - mem[SQ_HEAD]) % WRAP < SLOTS ->
     publish(CLIENT, SQ_SEQUENCE, SQ_PAYLOAD, posted);
     posted++;
     kick_daemon()
  :: posted > read && !READY(CQ_SEQUENCE, read) -> /* nothing to read: wait for a completion */
     store(CLIENT, CLIENT_WAITING, 1);
     kicks = mem[CQ_WAKE];
#ifndef NO_WAITER_FENCE
     fence(CLIENT);
#endif
     if
#ifndef NO_SECOND_LOOK
     :: READY(CQ_SEQUENCE, read)
     :: else ->
#else
     :: true ->
#endif
        fence(CLIENT); /* the system call */
        atomic {       /* compares and goes to sleep under the kernel's lock */
          if
          :: mem[CQ_WAKE] == kicks -> client_sleeps = true
          :: else
          fi
        }
        !client_sleeps
     fi;
     store(CLIENT, CLIENT_WAITING, 0)
  od;
  assert(posted == OPERATIONS && read == OPERATIONS)
}

#define ROOM ((done + WRAP - mem[CQ_HEAD]) % WRAP < GATE)
/* Unread completions at which the daemon stops reading submissions. */
#define GATE 1

active proctype Daemon() {
  byte done = 0, wakes = 0;
  run Drain(DAEMON);
  do
  :: done == OPERATIONS -> break
  :: done < OPERATIONS && READY(SQ_SEQUENCE, done) && ROOM ->
     assert(mem[SQ_PAYLOAD + (done % SLOTS)] == PAYLOAD(done));
     store(DAEMON, SQ_HEAD, (done + 1) % WRAP);
     publish(DAEMON, CQ_SEQUENCE, CQ_PAYLOAD, done);
     done++;
#ifndef NO_COMPLETER_FENCE
     fence(DAEMON);
#endif
     if
     :: mem[CLIENT_WAITING] == 1 ->
        wakes++;
        store(DAEMON, CQ_WAKE, wakes);
        fence(DAEMON); /* FUTEX_WAKE: a system call */
#ifndef NO_FUTEX_WAKE
        client_sleeps = false
#endif
     :: else
     fi
  :: done < OPERATIONS && !(READY(SQ_SEQUENCE, done) && ROOM) ->
     store(DAEMON, DAEMON_SLEEPING, 1);
#ifndef NO_SLEEPER_FENCE
     fence(DAEMON);
#endif
     if
     :: READY(SQ_SEQUENCE, done) && ROOM
     :: else -> event -> event = false /* epoll_wait */
     fi;
     store(DAEMON, DAEMON_SLEEPING, 0)
  od
}
