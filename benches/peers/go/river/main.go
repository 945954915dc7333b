// River, as a service uses it. Tuned as in its own benchmark (cmd/river/riverbench).
//
// benches/peers/rust/runner/src/lib.rs describes the protocol with the driver.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"log"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
)

const (
	payloadBytes = 512
	fillRows     = 500
)

var handled atomic.Int64

type NoOpArgs struct {
	Data string `json:"data"`
}

func (NoOpArgs) Kind() string { return "no_op" }

type NoOpWorker struct {
	river.WorkerDefaults[NoOpArgs]
}

func (*NoOpWorker) Work(context.Context, *river.Job[NoOpArgs]) error {
	handled.Add(1)
	return nil
}

func main() {
	if len(os.Args) != 4 {
		log.Fatal("usage: river URL JOBS defaults|tuned")
	}
	jobs, err := strconv.Atoi(os.Args[2])
	check(err)
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, os.Args[1])
	check(err)
	driver := riverpgxv5.New(pool)
	migrator, err := rivermigrate.New(driver, nil)
	check(err)
	_, err = migrator.Migrate(ctx, rivermigrate.DirectionUp, nil)
	check(err)

	workers := river.NewWorkers()
	river.AddWorker(workers, &NoOpWorker{})
	config := &river.Config{
		Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})),
		// MaxWorkers has no default; the example in River's README sets 100.
		Queues:  map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 100}},
		Workers: workers,
	}
	settings := map[string]any{"MaxWorkers": 100}
	if os.Args[3] == "tuned" {
		config.FetchCooldown = 2 * time.Millisecond
		config.FetchPollInterval = 20 * time.Millisecond
		config.Queues = map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 2_000}}
		settings = map[string]any{"MaxWorkers": 2_000, "FetchCooldown": "2 ms", "FetchPollInterval": "20 ms"}
	}
	client, err := river.NewClient(driver, config)
	check(err)

	args := NoOpArgs{Data: strings.Repeat("x", payloadBytes)}
	for left := jobs; left > 0; left -= fillRows {
		batch := make([]river.InsertManyParams, min(left, fillRows))
		for i := range batch {
			batch[i].Args = args
		}
		_, err = client.InsertManyFast(ctx, batch)
		check(err)
	}
	line, err := json.Marshal(map[string]any{"settings": settings})
	check(err)
	fmt.Println(string(line))
	input := bufio.NewReader(os.Stdin)
	_, err = input.ReadString('\n')
	check(err)

	check(client.Start(ctx))
	for handled.Load() < int64(jobs) {
		time.Sleep(time.Millisecond)
	}
	fmt.Println("handled")
	// The driver kills this process when it has measured. If the driver crashes, the input ends.
	_, _ = input.ReadString('\n')
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
