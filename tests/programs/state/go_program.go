// Go: goroutines, channels, tickers, the network poller, signals, a child process, the collector at work.
package main

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"sync/atomic"
	"syscall"
	"time"
)

var nonce string

func secret(label uint64) []byte {
	sum := sha256.Sum256([]byte(fmt.Sprint(nonce, label)))
	return sum[:]
}

func check(right bool, what string) {
	if !right {
		fmt.Println("FATAL " + what)
		os.Exit(70)
	}
}

func main() {
	drawn := make([]byte, 8)
	rand.Read(drawn)
	nonce = hex.EncodeToString(drawn)
	stop := os.Getenv("STATE_STOP")
	history := map[uint64][]byte{}
	var ticks uint64
	go func() {
		for range time.NewTicker(10 * time.Millisecond).C {
			atomic.AddUint64(&ticks, 1)
		}
	}()
	questions, answers := make(chan uint64), make(chan uint64)
	go func() {
		for question := range questions {
			answers <- question * 2
		}
	}()
	buffered := make(chan []byte, 10)
	for label := uint64(1000); label < 1005; label++ {
		buffered <- secret(label)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	check(err == nil, "listen")
	go func() {
		for {
			connection, err := listener.Accept()
			check(err == nil, "accept")
			go io.Copy(connection, connection)
		}
	}()
	client, err := net.Dial("tcp", listener.Addr().String())
	check(err == nil, "dial")
	cat := exec.Command("cat")
	in, _ := cat.StdinPipe()
	out, _ := cat.StdoutPipe()
	check(cat.Start() == nil, "start")
	lines := bufio.NewReader(out)
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGUSR1)
	fmt.Println("ready " + nonce)
	step := uint64(0)
	for {
		if _, err := os.Stat(stop); err == nil {
			break
		}
		step++
		history[step] = secret(step)
		questions <- step
		check(<-answers == step*2, "the goroutine's answer")
		client.SetDeadline(time.Now().Add(30 * time.Second))
		client.Write(secret(step))
		echo := make([]byte, 32)
		_, err := io.ReadFull(client, echo)
		check(err == nil && bytes.Equal(echo, secret(step)), fmt.Sprint("the TCP connection ", err))
		fmt.Fprintln(in, step)
		line, err := lines.ReadString('\n')
		check(err == nil && line == fmt.Sprintln(step), "the child process")
		syscall.Kill(os.Getpid(), syscall.SIGUSR1)
		select {
		case <-signals:
		case <-time.After(30 * time.Second):
			check(false, "a signal did not come")
		}
		old := 1 + step*7%uint64(len(history))
		check(bytes.Equal(history[old], secret(old)), "the history")
		before := atomic.LoadUint64(&ticks)
		for began := time.Now(); atomic.LoadUint64(&ticks) == before; time.Sleep(2 * time.Millisecond) {
			check(time.Since(began) < 30*time.Second, "the ticker stands still")
		}
		time.Sleep(15 * time.Millisecond)
	}
	for label := uint64(1000); label < 1005; label++ {
		check(bytes.Equal(<-buffered, secret(label)), "what was in the channel")
	}
	fmt.Println("pass", nonce, step)
}
